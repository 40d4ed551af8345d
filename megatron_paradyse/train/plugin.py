"""Wraps the two functions through which pretrain_gpt.py enters Megatron's training.

parse_and_validate_args gains the flags; pretrain gains the documents, the hook and the log. Both
pass through without --paradyse, and a script that is not ours never meets them then.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import re
import sys
from typing import NoReturn

from megatron_paradyse import megatron_start
from megatron_paradyse.errors import UserError, did_you_mean
from megatron_paradyse.settings import FIXED, PACKED, Settings
from megatron_paradyse.train.data_files import check_named
from megatron_paradyse.train.megatron_version import check_megatron
from megatron_paradyse.train.uncaught import show_user_errors_in_one_line

STDERR = 2

_installed = False
_model: str | None = None


def is_asked_for() -> bool:
    """Whether the command line has --paradyse, or another flag of this package."""
    return any(word == "--paradyse" or word.startswith("--paradyse-") for word in sys.argv[1:])


def install_if_asked_for() -> None:
    """install() for a script that is not ours: without a flag of this package nothing changes."""
    if is_asked_for():
        install()


def install(*, model: str | None = None) -> None:
    """Make Megatron know --paradyse; call it before pretrain_gpt.py imports from Megatron.

    model: the value of --paradyse-model unless it is given. On a machine without a GPU the CPU
    platform is put under Megatron first.
    """
    global _installed, _model
    _model = model or _model
    if _installed:
        return
    _installed = True
    show_user_errors_in_one_line()
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)  # a rank that crashes says where
    check_megatron()
    if "--paradyse" in sys.argv:
        megatron_start.before_cuda()
    try:
        on_cpu = megatron_start.make_ready()
        import megatron.training
        from megatron.training import arguments, training
    except Exception as error:
        raise megatron_start.cannot_import(error) from error

    _wrap_parsing(arguments, on_cpu)
    wrapped = _wrap_pretrain(training.pretrain)
    training.pretrain = wrapped
    megatron.training.pretrain = wrapped


def _wrap_parsing(arguments, on_cpu: bool) -> None:
    parse_args = arguments.parse_args
    validate_args = arguments.validate_args

    from megatron.training import argument_utils, checkpointing, initialize

    from megatron_paradyse.train import checkpoints
    from megatron_paradyse.train.arguments import (
        add_arguments,
        after_validation,
        before_validation,
        make_help_readable,
        refuse_unknown_names,
    )
    from megatron_paradyse.train.model_kind import GPT

    @functools.wraps(parse_args)
    def parse_with_paradyse(extra_args_provider=None, ignore_unknown_args=False):
        if is_asked_for() and any(word.partition("=")[0] == "--yaml-cfg" for word in sys.argv):
            raise UserError(
                "--yaml-cfg with --paradyse: Megatron then reads no flag: leave --yaml-cfg out, "
                "and give its values as flags"
            )

        def provider(parser):
            parser = extra_args_provider(parser) if extra_args_provider else parser
            parser.error = functools.partial(_parser_error, parser)
            refuse_unknown_names(parser)
            make_help_readable(parser)
            parser = add_arguments(parser)
            parser.set_defaults(paradyse_model=_model)
            return parser

        args = parse_args(provider, ignore_unknown_args)
        if args.yaml_cfg is not None:  # its values are all that there is
            args.paradyse, args.paradyse_model = False, GPT
        if on_cpu:
            from megatron_paradyse import cpu_platform

            cpu_platform.apply_arguments(args)
            return args
        megatron_start.check_initialization(args)
        if changed := megatron_start.complete(args):
            megatron_start.say_once(f"packages are missing, so {' '.join(changed)}")
        return args

    @functools.wraps(validate_args)
    def validate_with_paradyse(args, defaults=None):
        if on_cpu:
            from megatron_paradyse import cpu_platform

            cpu_platform.group_no_experts(args)
        before_validation(args)
        args = validate(args, defaults or {})
        after_validation(args)
        return args

    validate = _refusing_in_one_line(validate_args)
    checkpointing.load_args_from_checkpoint = checkpoints.reading_arguments(
        checkpointing.load_args_from_checkpoint
    )
    arguments.parse_args = parse_with_paradyse
    arguments.validate_args = validate_with_paradyse
    argument_utils.core_transformer_config_from_args = _refusing_in_one_line(
        argument_utils.core_transformer_config_from_args
    )  # which checks most of what concerns layers
    argument_utils.pretrain_cfg_container_from_args = _refusing_in_one_line(
        argument_utils.pretrain_cfg_container_from_args
    )  # and this what concerns the optimizer
    initialize.initialize_rerun_state_machine = _refusing_in_one_line(
        initialize.initialize_rerun_state_machine
    )  # and this opens a file


def _refusing_in_one_line(checks_flags):
    @functools.wraps(checks_flags)
    def check(*args, **kwargs):
        try:
            return checks_flags(*args, **kwargs)
        except UserError:
            raise
        except (AssertionError, ValueError, RuntimeError, ImportError, ZeroDivisionError) as error:
            reason = " ".join(str(error).split())
            if not reason or isinstance(error, ZeroDivisionError):  # --num-attention-heads 0
                reason = _failed_line(error)
            raise UserError(f"Megatron refuses these flags: {reason}") from error

    return check


def _failed_line(error: BaseException) -> str:
    """The source line of an assertion without a message, and what the flags in it say."""
    import traceback

    at = traceback.extract_tb(error.__traceback__)[-1]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    args = frame.f_locals.get("args")
    read = dict.fromkeys(re.findall(r"\bargs\.(\w+)", at.line or ""))
    given = {name: getattr(args, name) for name in read if hasattr(args, name)}
    flags = ", ".join(
        f"--{name.replace('_', '-')} {'is not given' if value is None else value}"
        for name, value in given.items()
    )
    where = f"{at.line} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})"
    return f"{where}: {flags}" if flags else where


def _parser_error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """argparse's error as one line, with the nearest flag as the remedy."""
    unknown = message.removeprefix("unrecognized arguments: ").split()
    if message.startswith("unrecognized arguments:") and unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = did_you_mean(unknown[0], known).rstrip()
        remedy = near or "see --help for the flags there are"
        raise UserError(f"unknown flag {unknown[0]}: {remedy}")
    raise UserError(f"{message}: see --help")


def _wrap_pretrain(pretrain):
    @functools.wraps(pretrain)
    def pretrain_with_paradyse(
        config, datasets_provider, model_type, forward_step, *args, **kwargs
    ):
        from megatron.training import get_args

        if not getattr(get_args(), "paradyse", False):
            return pretrain(config, datasets_provider, model_type, forward_step, *args, **kwargs)
        from megatron_paradyse.train.auto_costs import with_costs
        from megatron_paradyse.train.session import Session

        _check_model(config)
        if get_args().paradyse_settings.sequences != FIXED:
            check_named(get_args())
        watch_and_agree(get_args())
        megatron_start.use_own_device(get_args())
        get_args().paradyse_settings = with_costs(get_args())
        session = Session(get_args().paradyse_settings)
        session.enter(config)
        _announce(session.settings)
        provider = _documents(datasets_provider, forward_step, session)
        if session.settings.sequences == PACKED:
            from megatron_paradyse.train import gpt, packed_steps

            packed_steps.install()
            forward_step = gpt.forward_step  # a script's own knows no packed microbatches
        try:
            result = pretrain(config, provider, model_type, forward_step, *args, **kwargs)
        except SystemExit:  # --exit-interval, --exit-duration-in-mins, a signal: training ends well
            session.leave()
            raise
        session.leave()
        return result

    return pretrain_with_paradyse


def _check_model(config) -> None:
    """UserError where a script's model is none whose layers are switched."""
    from megatron.training.models.gpt import GPTModelConfig

    model = getattr(config, "model", None)
    if not isinstance(model, GPTModelConfig):
        found = "none in its config" if model is None else f"of {type(model).__name__}"
        raise UserError(
            f"this pretrain script's model is no GPT ({found}), whose layers --paradyse switches: "
            "drop it, or use pretrain_gpt.py"
        )


def watch_and_agree(args: argparse.Namespace) -> None:
    """From now on ranks watch each other; UserError where they would not compute alike."""
    from megatron_paradyse.train import watchdog
    from megatron_paradyse.train.agreement import agree
    from megatron_paradyse.train.meeting import check_launched, ranks

    check_launched()
    settings = getattr(args, "paradyse_settings", None) or Settings()
    watches = settings.watchdog_seconds > 0 and ranks()[1] > 1
    dog = watchdog.Watchdog(settings.watchdog_seconds) if watches else None
    agree(args, seconds=60.0 * args.distributed_timeout_minutes)
    if dog is not None:
        dog.start()


def _documents(datasets_provider, forward_step, session):
    """The provider of the datasets to use; documents also replace the script's get_batch."""
    from megatron.training import get_args

    from megatron_paradyse.train.data_files import check_fixed_splits

    if session.settings.sequences == FIXED:
        check_fixed_splits(get_args())
        return datasets_provider
    from megatron_paradyse.train.batch import document_batch
    from megatron_paradyse.train.datasets import document_provider

    script = forward_step.__globals__
    own = script.get("__name__") == "megatron_paradyse.train.gpt"
    if session.settings.sequences == PACKED:
        return document_provider(costs=session.packing_costs)
    if _is_bert() and not own:
        raise UserError(
            "--paradyse-model bert with a pretrain script of a GPT: use -m "
            "megatron_paradyse.pretrain_bert"
        )
    if "BATCH_KEYS" in script:  # an unmodified pretrain_gpt.py, whose get_batch returns a list
        keys = script["BATCH_KEYS"]

        def get_batch(data_iterator, vp_stage=None):
            batch = document_batch(data_iterator, vp_stage)
            return [batch.get(key) for key in keys]

        script["get_batch"] = get_batch
    elif not own:
        raise UserError(
            "this pretrain script has no BATCH_KEYS: documents need pretrain_gpt.py of "
            "Megatron-LM core_v0.19, or --paradyse-sequences fixed"
        )
    return document_provider(seconds=session.microbatch_seconds)


def _is_bert() -> bool:
    from megatron.training import get_args

    from megatron_paradyse.train.model_kind import BERT

    return get_args().paradyse_model == BERT


def _announce(settings) -> None:
    """On rank 0: what runs, on which sequences, with which attention kernel."""
    from megatron.training import get_args, get_tokenizer, print_rank_0

    from megatron_paradyse.train.data_files import other_vocabulary
    from megatron_paradyse.train.describe import attention_kernel

    args = get_args()
    kernel = attention_kernel(
        args, window=args.window_size is not None, dropout=args.attention_dropout > 0
    )
    print_rank_0(
        f"> paradyse: policy {settings.policy}, sequences {settings.sequences}, "
        f"head tile {settings.head_tile}, attention kernel {kernel.name}"
    )
    if settings.sequences != FIXED and (news := other_vocabulary(args, get_tokenizer())):
        print_rank_0(f"> paradyse: {news}")
