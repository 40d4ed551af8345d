"""Megatron's dataset provider, for documents: three iterators of microbatches."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.training import get_args, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_paradyse.costs.description import common_window
from megatron_paradyse.data.balance import Seconds
from megatron_paradyse.data.choices import BUCKETED
from megatron_paradyse.data.documents import DocumentDataset, SampleStream
from megatron_paradyse.data.loader import Balance, Sharding, microbatches
from megatron_paradyse.data.order import make_order
from megatron_paradyse.data.packed import PackedShares, packed_shares
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.pack import Costs, Grid, flops_costs
from megatron_paradyse.packing.placement import alignment
from megatron_paradyse.packing.wide import pack_wide
from megatron_paradyse.settings import PACKED
from megatron_paradyse.train.model_layers import ModelLayers, count_layers

SPLITS = ("train", "valid", "test")


def provide_document_iterators(
    num_samples,
    vp_stage: int | None = None,
    *,
    seconds: Seconds | None = None,
    costs: Costs | None = None,
) -> tuple:
    """Train, valid and test iterators for Megatron's "external" data loader.

    num_samples: Megatron's target sizes of the three. seconds: predicted for a microbatch (b, s),
    alike on every rank; the replicas of the training then get even shares. costs: the same for
    packed microbatches; None: their FLOPs. Raises UserError when a split that is needed has no
    sample.
    """
    args = get_args()
    sources = _sources(args)
    evaluated = 0 if args.skip_train else args.consumed_valid_samples  # as Megatron's own loaders
    consumed = (_consumed_in_phase(args), evaluated, 0)
    needed = (not args.skip_train, bool(args.eval_iters), bool(args.eval_iters))
    if args.paradyse_settings.sequences == PACKED:
        iterator_of = functools.partial(_packed, args, vp_stage, costs)
    else:
        iterator_of = functools.partial(_unpacked, args, seconds)
    return tuple(
        iterator_of(split, _stream(args, split, sources[i], num_samples[i]), consumed[i])
        if needed[i]
        else None
        for i, split in enumerate(SPLITS)
    )


def _consumed_in_phase(args) -> int:
    """Training samples since the last of --phase-transition-iterations, or since the beginning.

    As Megatron counts them: a phase has data of its own, and begins with their first sample.
    """
    if not args.phase_transition_iterations:
        return args.consumed_train_samples
    begun = max(i for i in (0, *args.phase_transition_iterations) if i <= args.iteration)
    return (args.iteration - begun) * args.global_batch_size


def _sources(args) -> list[tuple[list[str], list[float] | None, tuple[float, float] | None]]:
    """(prefixes, weights, share of the documents) of the three splits."""
    blend, per_split = get_blend_and_blend_per_split(args)
    if per_split is not None:
        return [(*(b or ([], None)), (0.0, 1.0)) for b in per_split]
    assert blend is not None, "check_named() comes first"
    matrix = convert_split_vector_to_split_matrix(
        parse_and_normalize_split(args.split or "969,30,1")
    )
    return [(*blend, share) for share in matrix]


def _stream(args, split: str, source, num_samples: int) -> SampleStream | None:
    """The samples of a split; None of a test split that has none."""
    prefixes, weights, share = source
    if weights is not None:  # Megatron draws a sample of a data set of weight 0 too
        drawn = [(prefix, w) for prefix, w in zip(prefixes, weights, strict=True) if w]
        prefixes, weights = [prefix for prefix, _ in drawn], [w for _, w in drawn]
    settings = args.paradyse_settings
    datasets = [
        DocumentDataset(
            prefix,
            fraction=share,
            seq_length=args.seq_length,
            long_documents=settings.long_documents,
            mmap=args.mmap_bin_files,
        )
        for prefix in (prefixes if share is not None else [])
    ]
    stream_size = sum(len(dataset) for dataset in datasets)
    if stream_size == 0 or (weights is not None and not all(len(d) for d in datasets)):
        if split == "test":
            return None
        change = "" if args.split is None else f"change --split {args.split}, "
        unlearnt = any(len(d) == 0 and d.samples.num_unlearnt for d in datasets)
        lacking = "with a token to learn" if unlearnt else "of two tokens or more"
        raise UserError(
            f"the {split} split has no document {lacking}: {change}add data, or set --eval-iters 0"
        )
    grouped = settings.order == BUCKETED and split == "train"
    stream = SampleStream(
        datasets,
        weights=weights,
        order=make_order(settings.order, seed=args.seed, group=args.global_batch_size),
        num_samples=max(num_samples or 0, 1),
        group=args.global_batch_size if grouped else 1,
    )
    whole_groups = weights is not None and grouped and not args.step_batch_size_schedule
    _report(split, datasets, settings, whole_groups=whole_groups)
    return stream


def _unpacked(
    args, seconds: Seconds | None, split: str, stream: SampleStream | None, consumed: int
) -> Iterator | None:
    if stream is None:
        return None
    is_train = split == "train"
    micro_batch_size = args.micro_batch_size if is_train else args.eval_micro_batch_size
    sharding = Sharding(
        micro_batch_size, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    )
    return microbatches(
        stream,
        sharding=sharding,
        consumed=consumed,
        alignment=alignment(args.tensor_model_parallel_size),
        num_workers=args.num_workers,
        balance=Balance(args.global_batch_size, seconds) if seconds and is_train else None,
    )


def _packed(
    args,
    vp_stage: int | None,
    costs: Costs | None,
    split: str,
    stream: SampleStream | None,
    consumed: int,
) -> Iterator | None:
    """Shares of global batches; every pipeline stage makes the same of them."""
    if stream is None:
        return None
    size = args.global_batch_size if split == "train" else args.eval_global_batch_size
    stages = args.pipeline_model_parallel_size
    interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
    grid = Grid(
        p=args.tensor_model_parallel_size,
        hidden_size=args.hidden_size,
        num_replicas=mpu.get_data_parallel_world_size(),
        alignment=alignment(args.tensor_model_parallel_size),
        multiple_of=(args.microbatch_group_size_per_vp_stage or stages) if interleaved else 1,
        stages=stages,
        window=common_window(ModelLayers.of_arguments(args, count_layers(args)).windows(args)),
        spread=args.paradyse_settings.spread,
    )
    shares = PackedShares(
        stream,
        functools.partial(
            pack_wide,
            tokens=args.paradyse_settings.pack_tokens,
            grid=grid,
            costs=costs or flops_costs(grid),
        ),
        global_batch_size=size,
        replica=mpu.get_data_parallel_rank(),
        alignment=grid.alignment,
        reads_tokens=is_first_or_last_pipeline_stage(vp_stage),
    )
    return packed_shares(
        shares, consumed=consumed, global_batch_size=size, num_workers=args.num_workers
    )


def _report(split: str, datasets: list[DocumentDataset], settings, *, whole_groups: bool) -> None:
    samples = sum(len(d) for d in datasets)
    shortest = min(int(d.lengths.min()) for d in datasets if len(d))
    longest = max(int(d.lengths.max()) for d in datasets if len(d))
    short = sum(d.samples.num_short for d in datasets)
    truncated = sum(d.samples.num_truncated for d in datasets)
    line = f"> {split}: {samples} sequences of {shortest} to {longest} tokens, {settings.order}"
    if whole_groups:
        line += ": each global batch is of one data set"
    if short:
        line += f"; {short} documents of under two tokens left out"
    if truncated:
        line += f"; {truncated} documents truncated"
    learnt, tokens = (
        sum(d.num_learnt for d in datasets),
        sum(int(d.lengths.sum()) for d in datasets),
    )
    if learnt < tokens:
        line += f"; {learnt / tokens:.1%} of the tokens are learnt"
    unlearnt = sum(d.samples.num_unlearnt for d in datasets)
    if unlearnt:
        line += f"; {unlearnt} sequences without any left out"
    print_rank_0(line)
