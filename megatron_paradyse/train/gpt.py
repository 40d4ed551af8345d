"""What pretrain_gpt.py of a Megatron-LM checkout gives to pretrain(): here on the wheel alone.

And the same for a BERT, of which Megatron-LM core_v0.19 has the model and no script.

Without --paradyse, or with --paradyse-sequences fixed, data are Megatron's GPTDataset.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training import training as megatron_training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import FIXED
from megatron_paradyse.train.batch import document_batch
from megatron_paradyse.train.model_kind import BERT, model_config
from megatron_paradyse.train.packed_batch import PackedStep

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
SPIKY_LOSS_FACTOR = 10  # as in Megatron-LM's pretrain_gpt.py: of the largest loss seen
LAUNCH = "run it through megatron_paradyse.launch with a checkout's pretrain_gpt.py"
stragglers = StragglerDetector()  # the one that Megatron configures and reports, --log-straggler


def pretrain() -> None:
    """Parse Megatron's flags and train the model that --paradyse-model names."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    for name in (
        "sft",
        "fim_data",
        "hybrid_context_parallel",
        "dataloader_inter_document_masking",
        "logits_load_dir",
        "inprocess_restart",
    ):
        if getattr(args, name, False):
            raise UserError(f"--{name.replace('_', '-')} is not in this entry point: {LAUNCH}")
    if args.paradyse_model == BERT:
        args.paradyse_settings = _with_mask_token(args)
    datasets = _provide_datasets
    datasets.is_distributed = True  # type: ignore[attr-defined]
    megatron_training.pretrain(
        pretrain_cfg_container_from_args(args, model_config(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def _with_mask_token(args):
    settings = args.paradyse_settings
    token = settings.mask_token
    if token is None:
        token = getattr(build_tokenizer(args), "mask", None)
    if token is None or not 0 <= token < args.padded_vocab_size:
        problem = "the tokenizer has no mask token" if token is None else f"mask token {token}"
        raise UserError(
            f"{problem}, of a vocabulary of {args.padded_vocab_size}: give --paradyse-mask-token "
            "ID, of a token that the data do not have"
        )
    return dataclasses.replace(settings, mask_token=token)


def forward_step(data_iterator, model):
    """One microbatch forward: the output tensor, and the function that makes the loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stragglers(bdata=True):
        batch = read_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    row = batch.get("packed_seq_params")
    with stragglers:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            **({} if row is None else {"packed_seq_params": row}),
        )
    return output, functools.partial(loss_function, batch["loss_mask"])


def read_batch(data_iterator, vp_stage: int | None = None) -> dict:
    """A microbatch, of documents or of Megatron's own data as the flags say, on every rank."""
    args = get_args()
    if isinstance(data_iterator, PackedStep):
        return data_iterator.read(vp_stage)
    if args.paradyse and args.paradyse_settings.sequences != FIXED:
        return document_batch(data_iterator, vp_stage)
    return _fixed_batch(data_iterator, vp_stage)


def loss_function(loss_mask: torch.Tensor | None, losses: torch.Tensor):
    """Sum of the losses [b, s] of the tokens that count, their number, and both for the log."""
    assert loss_mask is not None, "the loss belongs to the last pipeline stage"
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if get_args().check_for_spiky_loss:
        state = get_rerun_state_machine()
        state.validate_result(
            result=loss.detach() / num_tokens.clamp(min=1),  # sums are as long as documents
            rejection_func=functools.partial(
                state.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss per token"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def _fixed_batch(data_iterator, vp_stage) -> dict:
    """A microbatch of Megatron's own dataset, on every rank of the tensor-parallel group."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH)
    args = get_args()
    rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if rank == 0:
        batch = {
            name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=1,
        tp_rank=rank,
        micro_batch_size=(
            args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size
        ),
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers)
        and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return {name: batch.get(name) for name in BATCH}


def _provide_datasets(num_samples, vp_stage: int | None = None):
    """Megatron's GPTDataset or MockGPTDataset for the three splits."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None and not args.mock_data:
        raise UserError("no data: give --data-path PREFIX or --mock-data")
    config = _dataset_config(args, blend, blend_per_split)

    def is_built_on_this_rank() -> bool:
        first_or_last = is_first_or_last_pipeline_stage(vp_stage)
        return first_or_last and mpu.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_on_this_rank, config).build()


def _dataset_config(args, blend, blend_per_split) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=_sequences_per_dataset(args.per_dataset_sequences_path),
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def _sequences_per_dataset(path: str | None) -> dict | None:
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--per-dataset-sequences-path {path}: {error}: give the JSON file that Megatron-LM's "
            "tools/build_sequences_per_dataset.py wrote"
        ) from error
