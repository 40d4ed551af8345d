"""The --paradyse flags: added to Megatron's parser, checked around Megatron's own checks."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from megatron_paradyse import prediction
from megatron_paradyse.errors import UserError
from megatron_paradyse.setting_kinds import SWITCH
from megatron_paradyse.settings import FIELDS, FIXED, WITHOUT_FLAG, Settings, make_settings
from megatron_paradyse.train.batch_sizes import check_one_size, check_schedule_of_sizes
from megatron_paradyse.train.counting import samples_of
from megatron_paradyse.train.document_flags import (
    check_validation,
    prepare_documents,
    refuse_of_documents,
)
from megatron_paradyse.train.expert_flags import check_exchange, lie_over_replicas
from megatron_paradyse.train.megatron_limits import check_megatrons_limits
from megatron_paradyse.train.model_flags import (
    check_bert,
    check_edges,
    check_latent,
    check_model,
    check_prediction,
    check_prediction_stage,
    check_ranks,
    complete_window,
)
from megatron_paradyse.train.model_kind import GPT, SPECS
from megatron_paradyse.train.packed_flags import check_packed
from megatron_paradyse.train.schedule_flags import check_schedule
from megatron_paradyse.train.spread_flags import check_spread
from megatron_paradyse.train.strategy_flags import check_strategies, only_megatron_ts


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group; every default is None, so that a YAML file can tell what was given."""
    group = parser.add_argument_group("paradyse", "parallel strategies per layer and microbatch")
    add = group.add_argument
    add("--paradyse", action="store_true", help="switch ParaDySe on; without it nothing changes")
    add(
        "--paradyse-config",
        metavar="FILE",
        help="YAML file with the settings below, less 'paradyse-'",
    )
    add(
        "--paradyse-model",
        choices=tuple(SPECS),
        help="gpt (default), or bert: bidirectional, masked tokens are predicted; pretrain_bert "
        "sets it, a profile for it needs it",
    )
    for name in FIELDS:
        if name not in WITHOUT_FLAG:
            _add_setting(group, name)
    add("--paradyse-debug", action="store_true", help="print tracebacks for errors of the user")
    return parser


def make_help_readable(parser: argparse.ArgumentParser) -> None:
    """Megatron 0.19.2 has a text with a bare %, at which argparse ends instead of printing it."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = _escaped(action.help)


def _add_setting(group, name: str) -> None:
    """The flag of a setting; of a switch that which turns it from its default."""
    field, flag = FIELDS[name], name.replace("_", "-")
    kind, about, off = (field.metadata[key] for key in ("kind", "about", "off"))
    if kind is SWITCH:
        for value in (True, False):
            if value is not field.default:
                group.add_argument(
                    f"--paradyse-{flag}" if value else f"--paradyse-no-{flag}",
                    dest=f"paradyse_{name}",
                    action="store_const",
                    const=value,
                    help=_escaped(about if value else off),
                )
        return
    group.add_argument(
        f"--paradyse-{flag}",
        type=kind.flag_type,
        choices=kind.choices,
        metavar=kind.metavar,
        help=_escaped(about),
    )


def _escaped(text: str) -> str:
    """argparse fills in what follows a percent sign."""
    return text.replace("%", "%%")


def refuse_unknown_names(parser: argparse.ArgumentParser) -> None:
    """Of flags whose values Megatron looks up among names: argparse catches no KeyError."""
    for action in parser._actions:
        if callable(action.type) and not isinstance(action.type, type):
            action.type = _of_known_names(action.type, action.choices or ())


def _of_known_names(read: Callable[[str], Any], values: Iterable[Any]) -> Callable[[str], Any]:
    @functools.wraps(read)
    def read_known(text: str) -> Any:
        try:
            return read(text)
        except KeyError as error:
            known = ", ".join(getattr(value, "name", str(value)) for value in values)
            told = f"none of {known}" if known else "not known"
            raise argparse.ArgumentTypeError(f"{text!r} is {told}") from error

    return read_known


def before_validation(args: argparse.Namespace) -> None:
    """Check and complete arguments before Megatron validates them, in place.

    By then they are final: --use-checkpoint-args has set what a checkpoint says. Raises UserError
    for a combination that cannot run.
    """
    args.paradyse_model = args.paradyse_model or GPT
    if not args.paradyse:
        if args.paradyse_model != GPT:  # pretrain_bert gives that flag itself
            raise UserError(
                "a BERT without --paradyse, which Megatron has no training of: add --paradyse"
            )
        given = [
            f"--{name.replace('_', '-')}"
            for name, value in vars(args).items()
            if name.startswith("paradyse_") and value not in (None, False, GPT)
        ]
        given = [flag for flag in given if flag != "--paradyse-debug"]
        if given:
            raise UserError(f"{given[0]} has no effect without --paradyse: add --paradyse")
        return
    flags = {
        name: getattr(args, f"paradyse_{name}")
        for name in Settings.__dataclass_fields__
        if hasattr(args, f"paradyse_{name}")
    }
    args.paradyse_settings = make_settings(flags, args.paradyse_config)
    check_schedule(args)
    check_schedule_of_sizes(args)
    check_model(args)
    complete_window(args)
    check_megatrons_limits(args)
    check_bert(args)
    check_latent(args)
    check_prediction(args)
    check_edges(args)
    names = check_strategies(args)
    spec = SPECS[args.paradyse_model]
    if args.spec is not None and list(args.spec) != spec:
        raise UserError(
            f"--spec {' '.join(args.spec)} with --paradyse: leave --spec out, or give "
            f"--spec {' '.join(spec)}"
        )
    args.spec = spec
    args.paradyse_instead_of = {"spec": None}
    if not (args.eval_interval and args.eval_interval > 0):  # no evaluation goes by it, but
        args.paradyse_instead_of["eval_interval"] = args.eval_interval
        args.eval_interval = sys.maxsize  # Megatron divides by it once a checkpoint is loaded
    args.create_attention_mask_in_dataloader = False  # causal kernels need no [s, s] mask
    check_packed(args, names, only_megatron_ts=only_megatron_ts(args))
    if args.paradyse_settings.sequences == FIXED:
        refuse_of_documents(args.paradyse_settings)
    else:
        prepare_documents(args)
    check_ranks(args)
    check_spread(args, names)


def after_validation(args: argparse.Namespace) -> None:
    """Set what Megatron's validation resets, in place; UserError for what it has added."""
    if not args.paradyse:
        return
    if args.iterations_to_skip:  # --result-rejected-tracker-filename names more of them
        raise UserError(
            f"--iterations-to-skip {' '.join(map(str, args.iterations_to_skip))} with --paradyse: "
            "Megatron skips by reading batches of a fixed length: leave --iterations-to-skip and "
            "--result-rejected-tracker-filename out"
        )
    check_prediction_stage(args)
    if args.mtp_num_layers:
        prediction.install()
    check_one_size(args)
    args.paradyse_samples = samples_of(args)
    if args.paradyse_settings.sequences != FIXED:
        check_validation(args)
        check_exchange(args)
        args.dataloader_type = "external"
        if args.pipeline_model_parallel_size > 1:
            args.variable_seq_lengths = True  # stages then tell each other their shapes
        several = max(args.pipeline_model_parallel_size, args.expert_model_parallel_size) > 1
        of_one_length = args.moe_token_dispatcher_type == "allgather"  # everywhere
        if of_one_length and (several or lie_over_replicas(args)):
            args.moe_token_dispatcher_type = "alltoall"  # Megatron asks for it, even if dense
