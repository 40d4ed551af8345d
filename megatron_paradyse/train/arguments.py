"""The --paradyse flags: added to Megatron's parser, checked around Megatron's own checks."""

from __future__ import annotations

import argparse
import dataclasses

import torch

from megatron_paradyse.edges.tiles import OFF
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.planner.from_file import check_policy, read_costs
from megatron_paradyse.policy import PlanFilePolicy, cost_policy_kind, make_policy
from megatron_paradyse.setting_kinds import SWITCH
from megatron_paradyse.settings import (
    BY_COST,
    DOCUMENTS,
    FIELDS,
    FIXED,
    PACKED,
    WITHOUT_FLAG,
    Settings,
    make_settings,
)
from megatron_paradyse.strategies import (
    PACKED_ONLY,
    RECOMPUTE,
    base_name,
    get_strategy,
    parse_strategy_name,
)
from megatron_paradyse.strategies.contract import AttentionShape
from megatron_paradyse.train.counting import samples_of
from megatron_paradyse.train.document_flags import prepare_documents
from megatron_paradyse.train.model_kind import BERT, GPT, SPECS
from megatron_paradyse.train.packed_flags import check_packed
from megatron_paradyse.units import parse_bytes

FLAG_OF = {"fp8": "--fp8-format", "fp4": "--fp4-format"}  # arguments of another name


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


def before_validation(args: argparse.Namespace) -> None:
    """Check and complete arguments before Megatron validates them, in place.

    By then they are final: --use-checkpoint-args has set what a checkpoint says. Raises UserError
    for a combination that cannot run.
    """
    args.paradyse_model = args.paradyse_model or GPT
    if not args.paradyse:
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
    _check_schedule(args)
    _check_model(args)
    _check_bert(args)
    _check_edges(args)
    _check_strategies(args)
    spec = SPECS[args.paradyse_model]
    if args.spec is not None and list(args.spec) != spec:
        raise UserError(
            f"--spec {' '.join(args.spec)} with --paradyse: leave --spec out, or give "
            f"--spec {' '.join(spec)}"
        )
    args.spec = spec
    args.paradyse_instead_of = {"spec": None}
    args.create_attention_mask_in_dataloader = False  # causal kernels need no [s, s] mask
    check_packed(args, only_megatron_ts=_only_megatron_ts(args))
    if args.paradyse_settings.sequences != FIXED:
        prepare_documents(args)


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
    args.paradyse_samples = samples_of(args)
    if args.paradyse_settings.sequences != FIXED:
        args.dataloader_type = "external"
        if args.pipeline_model_parallel_size > 1:
            args.variable_seq_lengths = True  # stages then tell each other their shapes
        several = max(args.pipeline_model_parallel_size, args.expert_model_parallel_size) > 1
        if several and args.moe_token_dispatcher_type == "allgather":  # of one length everywhere
            args.moe_token_dispatcher_type = "alltoall"  # Megatron asks for it, even if dense


def _check_schedule(args: argparse.Namespace) -> None:
    """Megatron's own checks of it come once the model is built, and say nothing."""
    for unit in ("iters", "samples"):
        asked = getattr(args, f"train_{unit}")
        if asked is not None and asked < 1 and not args.skip_train:
            raise UserError(
                f"--train-{unit} {asked} trains nothing: give 1 or more, or --skip-train"
            )
        total = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        warmup = getattr(args, f"lr_warmup_{unit}")
        if total and warmup >= total:
            raise UserError(
                f"--lr-warmup-{unit} {warmup} with a learning rate of {total} {unit}: give fewer, "
                f"or more --train-{unit} or --lr-decay-{unit}"
            )
    phases = args.phase_transition_iterations
    if phases and not args.train_samples:
        raise UserError(
            f"--phase-transition-iterations {phases} without --train-samples: Megatron counts "
            "phases in samples: give --train-samples, iterations times --global-batch-size"
        )
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if phases and getattr(args, name):
            raise UserError(
                f"--phase-transition-iterations {phases} with --{name.replace('_', '-')}: Megatron "
                "counts a phase's samples by one batch size: drop one"
            )


def _check_model(args: argparse.Namespace) -> None:
    p = args.tensor_model_parallel_size
    if p > 1 and not args.sequence_parallel:
        raise UserError(
            f"--paradyse with --tensor-model-parallel-size {p} needs --sequence-parallel: add it"
        )
    heads = args.num_attention_heads
    if heads and heads % p:
        fitting = max(q for q in range(1, p + 1) if heads % q == 0)
        raise UserError(
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {p}: "
            f"use --tensor-model-parallel-size {fitting}"
        )
    refused: dict[str, tuple[object, str]] = {
        "context_parallel_size": (1, "--paradyse shares sequences over the tensor-parallel group"),
        "multi_latent_attention": (False, "latent attention has no switchable strategy"),
        "mtp_num_layers": (None, "multi-token prediction is not supported"),
        "fp8": (None, "strategies run in float32, bfloat16 and float16"),
        "fp4": (None, "strategies run in float32, bfloat16 and float16"),
        "cuda_graph_impl": ("none", "a captured graph cannot change its strategy"),
        "enable_cuda_graph": (False, "a captured graph cannot change its strategy"),
        "external_cuda_graph": (False, "a captured graph cannot change its strategy"),
        "reset_attention_mask": (False, "attention is causal over the whole sequence"),
        "log_max_attention_logit": (False, "only some strategies would log it"),
        "qk_clip": (False, "only some strategies would record the logits that it clips by"),
        "fine_grained_activation_offloading": (False, "strategies with +offload do that"),
        "cpu_offloading_num_layers": (0, "strategies with +offload do that"),
        "overlap_moe_expert_parallel_comm": (False, "it replaces the layer's forward"),
        "use_transformer_engine_op_fuser": (False, "its MLP has no switchable strategy"),
        "tp_comm_overlap": (False, "its buffers have one fixed sequence length"),
        "hybrid_context_parallel": (False, "its schedule shares out sequences by itself"),
        "experimental_attention_variant": (None, "it has no switchable strategy"),
        "heterogeneous_layers_config_path": (None, "plans are of layers of one size"),
        "heterogeneous_layers_config_encoded_json": (None, "plans are of layers of one size"),
        "perform_rl_step": (False, "plans are made for pretraining"),
        "inprocess_restart": (False, "a rank that fails ends, and torchrun starts again"),
    }
    for name, (allowed, why) in refused.items():
        value = getattr(args, name, allowed)
        if value != allowed:
            flag = FLAG_OF.get(name) or "--" + name.replace("_", "-")
            raise UserError(f"{flag} {value} with --paradyse: {why}: leave {flag} out")


def _check_bert(args: argparse.Namespace) -> None:
    settings = args.paradyse_settings
    if args.paradyse_model != BERT:
        if settings.mask_token is not None:
            raise UserError(
                f"--paradyse-mask-token {settings.mask_token} has no effect on a GPT: leave "
                "it out, or train with megatron_paradyse.pretrain_bert"
            )
        return
    if settings.sequences != DOCUMENTS:
        raise UserError(
            f"--paradyse-sequences {settings.sequences} with a BERT: it trains on documents: leave "
            "it out"
        )
    if args.num_experts:
        raise UserError(f"--num-experts {args.num_experts} with a BERT: leave --num-experts out")
    if args.eod_mask_loss:
        raise UserError(
            "--eod-mask-loss with a BERT, which predicts masked tokens alone: leave it out"
        )


def _check_edges(args: argparse.Namespace) -> None:
    settings = args.paradyse_settings
    _check_own_modules(args)
    if settings.head_tile == OFF:
        return
    refused = {
        "defer_embedding_wgrad_compute": "keeps the gradients of all logits",
        "config_logger_dir": "writes all logits",
        "use_mup": "scales all logits",
        "logits_save_dir": "keeps all logits",
        "logits_load_dir": "compares all logits",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise UserError(
                f"--{name.replace('_', '-')} {why}, which the loss head in tiles never has: "
                "leave it out, or give --paradyse-head-tile off"
            )


def _check_own_modules(args: argparse.Namespace) -> None:
    """Flags that only the forward of Megatron's own linears obeys."""
    settings = args.paradyse_settings
    megatrons = settings.policy == f"fixed:{MEGATRON_TS}" and settings.sequences != PACKED
    if megatrons and settings.head_tile == OFF:
        return
    shards = args.tensor_parallel_num_weight_shards
    sharded = shards not in (None, args.tensor_model_parallel_size)
    whole, own = "need whole weights", "do not call the linears whose tensors it saves"
    refused = {
        "tensor_parallel_num_weight_shards": (sharded, whole),
        "use_megatron_fsdp": (args.use_megatron_fsdp, whole),
        "use_torch_fsdp2": (args.use_torch_fsdp2, whole),
        "save_activations_interval": (args.save_activations_interval, own),
        "save_dgrads_interval": (args.save_dgrads_interval, own),
    }
    for name, (given, why) in refused.items():
        if given:
            raise UserError(
                f"--{name.replace('_', '-')} with --paradyse: strategies, packed rows and the loss "
                f"head in tiles {why}: leave it out, or give --paradyse-policy fixed:{MEGATRON_TS} "
                "and --paradyse-head-tile off"
            )


def _check_strategies(args: argparse.Namespace) -> None:
    """Every strategy that the policy may choose must be able to run this model on p ranks."""
    heads = args.num_attention_heads
    if not heads:
        return  # Megatron says that it is missing
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.kv_channels or args.hidden_size // heads,
        causal=args.paradyse_model == GPT,
        softmax_scale=1.0,
    )
    settings = args.paradyse_settings
    names = _strategies_of_policy(args, settings)
    if cost_policy_kind(settings) and args.recompute_granularity == "full":
        raise UserError(
            f"--recompute-granularity full with --paradyse-policy {settings.policy}, whose plans "
            "say what is recomputed: leave --recompute-granularity out"
        )
    for name in names:
        get_strategy(name).check(shape, args.tensor_model_parallel_size)
    others = [name for name in names if parse_strategy_name(name)[0] != MEGATRON_TS]
    problem = _only_megatron_ts(args)
    if problem is not None and others:
        raise UserError(
            f"{problem} does not run with {others[0]}: use --paradyse-policy fixed:megatron_ts"
        )
    if problem is not None and not names:  # costs of our own choosing
        names = (MEGATRON_TS, MEGATRON_TS + RECOMPUTE)
        args.paradyse_settings = dataclasses.replace(settings, strategies=names)


def _only_megatron_ts(args: argparse.Namespace) -> str | None:
    """The flag that no other strategy can run, if there is one."""
    if args.position_embedding_type not in ("learned_absolute", "rope", "none"):
        return f"--position-embedding-type {args.position_embedding_type}"
    for name in ("attention_output_gate", "batch_invariant_mode", "use_kitchen_attention"):
        if getattr(args, name, False):
            return "--" + name.replace("_", "-")
    return None if args.softmax_type == "vanilla" else f"--softmax-type {args.softmax_type}"


def _strategies_of_policy(args: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    """Every strategy that a plan may name; settings that the policy does not read are refused."""
    if settings.memory_budget is not None:
        parse_bytes(settings.memory_budget)
    if cost_policy_kind(settings) and settings.cost_model is None:
        check_policy(settings)
        return settings.strategies or ()
    if cost_policy_kind(settings):
        return read_costs(settings).strategies
    policy = make_policy(settings)
    alone = [name for name in policy.strategies if base_name(name) in PACKED_ONLY]
    if alone and settings.sequences != PACKED:
        raise UserError(
            f"{alone[0]} runs packed documents only: give --paradyse-sequences packed, or another "
            "strategy"
        )
    ineffective = [name for name in BY_COST if getattr(settings, name) != getattr(Settings, name)]
    if settings.memory_budget is not None and torch.cuda.is_available():
        ineffective.append("memory_budget")
    if ineffective:
        raise UserError(
            f"{_flag_of(settings, ineffective[0])} has no effect with --paradyse-policy "
            f"{settings.policy}, which does not choose by cost: leave it out"
        )
    if isinstance(policy, PlanFilePolicy) and args.num_layers:
        policy.check_layers(args.num_layers)
    return policy.strategies


def _flag_of(settings: Settings, name: str) -> str:
    """What a user has written to set it."""
    if name in WITHOUT_FLAG:
        return name
    return f"--paradyse-{'no-' if getattr(settings, name) is False else ''}{name.replace('_', '-')}"
