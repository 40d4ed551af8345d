"""Which of Megatron's flags run with --paradyse: of the ranks, the model and its loss head."""

from __future__ import annotations

import argparse

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_paradyse.edges.tiles import OFF
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.settings import FIXED, PACKED
from megatron_paradyse.train.model_kind import BERT

DTYPES = "strategies run in float32, bfloat16 and float16"
FLAG_OF = {"fp8": "--fp8-format", "fp4": "--fp4-format"}  # arguments of another name


def check_ranks(args: argparse.Namespace) -> None:
    """UserError unless the ranks make whole replicas of the grid, and of that of experts."""
    p, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.world_size % (p * stages):
        raise UserError(
            f"the number of ranks, {args.world_size}, is no multiple of "
            f"--tensor-model-parallel-size {p} times --pipeline-model-parallel-size {stages}: "
            f"start {p * stages} or a multiple (--nproc-per-node of torchrun, --nproc of a "
            "profile), or change these flags"
        )
    experts, each = args.expert_model_parallel_size, args.expert_tensor_parallel_size or p
    if args.world_size % (ranks := each * experts * stages):
        raise UserError(
            f"--expert-model-parallel-size {experts} takes {ranks} ranks or a multiple, with "
            f"{each} for an expert (--expert-tensor-parallel-size) and {stages} pipeline "
            f"stages, got {args.world_size}: start so many, or change these flags"
        )


def check_model(args: argparse.Namespace) -> None:
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
        "mla_down_proj_fusion": (False, "strategies have the down projections apart"),
        "cache_mla_latents": (False, "it is of inference"),
        "fp8": (None, DTYPES),
        "fp4": (None, DTYPES),
        "te_precision_config_file": (None, DTYPES),
        "kitchen_config_file": (None, DTYPES),
        "kitchen_recipe_number": (None, DTYPES),
        "fp32_residual_connection": (False, "the norms of layers take their weights' dtype alone"),
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


def check_prediction(args: argparse.Namespace) -> None:
    """Of multi-token prediction (--mtp-num-layers)."""
    number = args.mtp_num_layers
    if number is None:
        return
    if number < 1:
        raise UserError(
            f"--mtp-num-layers {number} predicts nothing: give 1 or more, or leave it out"
        )
    if args.paradyse_model == BERT:
        raise UserError(f"--mtp-num-layers {number} with a BERT: leave --mtp-num-layers out")
    tied = not args.untie_embeddings_and_output_weights
    stages = args.pipeline_model_parallel_size
    flag = "--save" if args.save else "--load" if args.load else None
    if flag and tied and stages > 1 and args.ckpt_format != "torch":
        raise UserError(
            f"{flag} with --mtp-num-layers {number}, --pipeline-model-parallel-size {stages} and "
            "tied embeddings, whose distributed checkpoints Megatron 0.19 neither saves nor loads: "
            "give --ckpt-format torch, or --untie-embeddings-and-output-weights"
        )
    repeated = number > 1 and args.mtp_use_repeated_layer and args.overlap_grad_reduce
    if repeated and args.paradyse_settings.policy.startswith("random:"):
        raise UserError(
            f"--overlap-grad-reduce with --mtp-num-layers {number}, --mtp-use-repeated-layer and "
            f"--paradyse-policy {args.paradyse_settings.policy}: Megatron reduces a gradient once "
            "it came as often as in the first iteration, and with +recompute it comes each time "
            "that the layer ran: leave --overlap-grad-reduce out"
        )
    many = args.recompute_num_layers
    full = args.recompute_granularity == "full" and args.recompute_method == "uniform"
    if full and many not in (None, 1):
        raise UserError(
            f"--recompute-num-layers {many} with --mtp-num-layers {number}, whose layers Megatron "
            "recomputes one by one: give --recompute-num-layers 1"
        )


def check_costs_know(args: argparse.Namespace) -> None:
    """UserError where costs would tell nothing of a part of the model."""
    if (args.mtp_num_layers or 0) > (args.num_layers or 0):
        raise UserError(
            f"--mtp-num-layers {args.mtp_num_layers} with --num-layers {args.num_layers}: costs "
            "tell nothing of more layers than the decoder has: give fewer, or train with "
            "--paradyse-policy fixed:STRATEGY or plan:FILE"
        )
    if (args.mtp_num_layers or 0) > 1 and args.mtp_use_repeated_layer:
        raise UserError(
            f"--mtp-use-repeated-layer with --mtp-num-layers {args.mtp_num_layers}: costs tell "
            "nothing of a layer that runs several times: leave it out, or train with "
            "--paradyse-policy fixed:STRATEGY or plan:FILE"
        )


def check_prediction_stage(args: argparse.Namespace) -> None:
    """UserError where a layout has multi-token prediction apart from the loss."""
    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if not args.mtp_num_layers or layout is None:
        return
    last = PipelineParallelLayerLayout(layout, stages).layout[-1][-1]
    if LayerType.mtp not in last:
        raise UserError(
            f"--pipeline-model-parallel-layout {layout}: multi-token prediction (m) in another "
            "stage than the loss (L): put both into the last, as in Et|tmL"
        )


def complete_window(args: argparse.Namespace) -> None:
    """What a causal --window-size means to TransformerEngine, in place: no later key is seen, and
    a negative number hides none. Megatron's attention in PyTorch takes both by the letter.
    """
    if args.window_size and args.paradyse_model != BERT:
        before = args.window_size[0]
        args.window_size = None if before < 0 else (before, 0)


def check_bert(args: argparse.Namespace) -> None:
    """UserError for what a BERT cannot have, and for flags of a BERT on a GPT."""
    settings = args.paradyse_settings
    if args.paradyse_model != BERT:
        if settings.mask_token is not None:
            raise UserError(
                f"--paradyse-mask-token {settings.mask_token} has no effect on a GPT: leave "
                "it out, or train with megatron_paradyse.pretrain_bert"
            )
        return
    if settings.sequences == FIXED:
        raise UserError(
            f"--paradyse-sequences {FIXED} with a BERT: it trains on documents: give documents or "
            "packed"
        )
    if args.position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise UserError(
            f"--position-embedding-type {args.position_embedding_type} with a BERT, which Megatron "
            "would train without positions: use rope"
        )
    if args.num_experts:
        raise UserError(f"--num-experts {args.num_experts} with a BERT: leave --num-experts out")
    if args.window_size:
        raise UserError(
            f"--window-size {','.join(map(str, args.window_size))} with a BERT, whose attention is "
            "bidirectional: leave --window-size out"
        )
    if args.eod_mask_loss:
        raise UserError(
            "--eod-mask-loss with a BERT, which predicts masked tokens alone: leave it out"
        )


def check_latent(args: argparse.Namespace) -> None:
    """Of --multi-latent-attention, which rotates by --rope-type."""
    if not args.multi_latent_attention:
        return
    if args.paradyse_model == BERT:
        raise UserError(
            "--multi-latent-attention with a BERT, whose layer in Megatron has none: leave it out"
        )
    if args.attention_output_gate:
        raise UserError(
            "--attention-output-gate with --multi-latent-attention, which has no gate in Megatron: "
            "leave --attention-output-gate out"
        )
    if args.position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise UserError(
            f"--position-embedding-type {args.position_embedding_type} with "
            "--multi-latent-attention, which rotates by --rope-type: give "
            "--position-embedding-type rope"
        )
    if args.rotary_interleaved:
        raise UserError(
            "--rotary-interleaved with --multi-latent-attention, whose pairs of channels lie side "
            "by side anyway: leave it out"
        )
    p, positions = args.tensor_model_parallel_size, args.qk_pos_emb_head_dim
    if args.transformer_impl != "local":
        return
    for name, size in (("q_lora_rank", args.q_lora_rank), ("kv_lora_rank", args.kv_lora_rank)):
        columns = (size or 0) + (positions if name == "kv_lora_rank" else 0)
        if columns % p:
            more = f" plus --qk-pos-emb-head-dim {positions}" if columns != size else ""
            raise UserError(
                f"--{name.replace('_', '-')} {size}{more} is no multiple of "
                f"--tensor-model-parallel-size {p}, over which --transformer-impl local shares "
                "them: give a multiple"
            )


def check_edges(args: argparse.Namespace) -> None:
    """UserError for flags that tiles, or strategies without Megatron's linears, cannot obey."""
    settings = args.paradyse_settings
    _check_own_modules(args)
    if settings.head_tile == OFF:
        return
    refused = {
        "defer_embedding_wgrad_compute": "keeps the gradients of all logits",
        "config_logger_dir": "writes all logits",
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
