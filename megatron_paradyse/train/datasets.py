"""Megatron's dataset provider, for documents: three iterators of microbatches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.training import get_args, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch.utils.data import DataLoader

from megatron_paradyse.costs.description import common_window
from megatron_paradyse.data.balance import Seconds
from megatron_paradyse.data.choices import BUCKETED
from megatron_paradyse.data.documents import DocumentDataset, SampleStream
from megatron_paradyse.data.loader import (
    Balance,
    BatchSizes,
    Samples,
    Sharding,
    WorkerStart,
    microbatches,
)
from megatron_paradyse.data.order import make_order
from megatron_paradyse.data.packed import Objective, PackedShares, next_tokens, packed_shares
from megatron_paradyse.data.whole_set import OneEpoch, WholeSet
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.pack import Costs, Grid, flops_costs
from megatron_paradyse.packing.placement import alignment
from megatron_paradyse.packing.wide import pack_wide
from megatron_paradyse.settings import PACKED
from megatron_paradyse.train.batch import masking_of
from megatron_paradyse.train.batch_sizes import batch_sizes, group_size
from megatron_paradyse.train.helper_processes import begin_worker
from megatron_paradyse.train.masking import Masking, mask_document
from megatron_paradyse.train.model_kind import GPT
from megatron_paradyse.train.model_layers import ModelLayers, count_layers
from megatron_paradyse.units import counted

SPLITS = ("train", "valid", "test")
# Prefixes, weights and share of the documents of a split.
Source = tuple[list[str], list[float] | None, tuple[float, float] | None]


def document_provider(
    *, seconds: Seconds | None = None, costs: Costs | None = None
) -> Callable[..., tuple]:
    """Train, valid and test iterators for Megatron's "external" data loader.

    seconds: predicted for a microbatch (b, s), alike on every rank; the replicas of the training
    then get even shares. costs: the same for packed microbatches; None: their FLOPs. It raises
    UserError when a split that is needed has no sample.
    """
    provider = functools.partial(_provide, seconds=seconds, costs=costs)
    # With --full-validation Megatron must be told on every rank how many data sets there are.
    provider.is_distributed = get_args().full_validation  # type: ignore[attr-defined]
    return provider


def _provide(
    num_samples, vp_stage: int | None = None, *, seconds: Seconds | None, costs: Costs | None
) -> tuple:
    """num_samples: Megatron's target sizes of the three."""
    args = get_args()
    if args.full_validation and mpu.get_tensor_model_parallel_rank() != 0:  # which reads none
        _, (prefixes, *_), _ = _sources(args)
        return None, [None] * len(prefixes), None
    make = functools.partial(_packed, costs=costs, vp_stage=vp_stage)
    if args.paradyse_settings.sequences != PACKED:
        make = functools.partial(_unpacked, seconds=seconds)
    splits = zip(SPLITS, _sources(args), num_samples, strict=True)
    return tuple(
        _of_split(args, split, source, size, make) if _is_needed(args, split, source) else None
        for split, source, size in splits
    )


def _is_needed(args, split: str, source: Source) -> bool:
    if split == "train":
        return not args.skip_train
    if not args.full_validation:
        return bool(args.eval_iters)
    if split == "test" and source[0] and source[2]:
        print_rank_0(
            "> paradyse: the test split is left out: Megatron cannot evaluate it with "
            "--full-validation"
        )
    return split == "valid"


def _of_split(args, split: str, source: Source, num_samples: int | None, make) -> Any:
    """An iterator; of --full-validation, the data sets; None of a test split without a sample."""
    if args.full_validation and split == "valid":
        return _whole_sets(args, source, make)
    stream = _stream(args, split, source, num_samples)
    if stream is None:
        return None
    return iter(make(args, split, stream, consumed=_consumed(args, split)))


def _consumed(args, split: str) -> int:
    """As Megatron's own loaders count, which begin an evaluation alone at the first sample."""
    if split == "train":
        return _consumed_in_phase(args)
    return 0 if args.skip_train or split == "test" else args.consumed_valid_samples


def _whole_sets(args, source: Source, make) -> list[WholeSet]:
    """Of --full-validation: one of each data set."""
    prefixes, _, share = source
    names = args.validation_set_names or list(map(str, range(len(prefixes))))
    if len(names) != len(prefixes):
        raise UserError(
            f"--validation-set-names gives {counted(len(names), 'name')} to "
            f"{counted(len(prefixes), 'data set')}: give one to each"
        )
    size, sets = args.eval_global_batch_size, []
    for name, prefix in zip(names, prefixes, strict=True):
        print_rank_0(f"> paradyse: validation-{name} is all of {prefix}, at each evaluation")
        stream = _stream(args, "valid", ([prefix], None, share), 0)
        assert stream is not None, "UserError where there is no document"
        num_iterations = -(-stream.epoch_size // size)
        epoch = OneEpoch(stream, stream.epoch_size)
        loader = make(args, "valid", epoch, stop=num_iterations * size)
        sets.append(WholeSet(loader, num_iterations))
    return sets


def _consumed_in_phase(args) -> int:
    """Training samples since the last of --phase-transition-iterations, or since the beginning.

    As Megatron counts them: a phase has data of its own, and begins with their first sample.
    """
    if not args.phase_transition_iterations:
        return args.consumed_train_samples
    begun = max(i for i in (0, *args.phase_transition_iterations) if i <= args.iteration)
    return (args.iteration - begun) * args.global_batch_size


def _sources(args) -> list[Source]:
    """Of the three splits."""
    blend, per_split = get_blend_and_blend_per_split(args)
    if per_split is not None:
        return [(*(b or ([], None)), (0.0, 1.0)) for b in per_split]
    assert blend is not None, "check_named() comes first"
    matrix = convert_split_vector_to_split_matrix(
        parse_and_normalize_split(args.split or "969,30,1")
    )
    return [(*blend, share) for share in matrix]


def _stream(args, split: str, source: Source, num_samples: int | None) -> SampleStream | None:
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
        for prefix in prefixes
        if share is not None
    ]
    stream_size = sum(len(dataset) for dataset in datasets)
    if stream_size == 0 or (weights is not None and not all(len(d) for d in datasets)):
        if split == "test":
            return None
        change = "" if args.split is None else f"change --split {args.split}, "
        unlearnt = any(len(d) == 0 and d.samples.num_unlearnt for d in datasets)
        lacking = "with a token to learn" if unlearnt else "of two tokens or more"
        without = "drop --full-validation" if args.full_validation else "set --eval-iters 0"
        if split == "train":
            without = "give another --data-path"
        raise UserError(
            f"the {split} split has no document {lacking}: {change}add data, or {without}"
        )
    grouped = settings.order == BUCKETED and split == "train"
    stream = SampleStream(
        datasets,
        weights=weights,
        order=make_order(settings.order, seed=args.seed, group=group_size(args)),
        num_samples=max(num_samples or 0, 1),
        group=group_size(args) if grouped else 1,
    )
    whole_groups = weights is not None and grouped and not args.step_batch_size_schedule
    _report(split, datasets, settings, whole_groups=whole_groups)
    return stream


def _unpacked(
    args,
    split: str,
    stream: Samples,
    *,
    consumed: int = 0,
    stop: int | None = None,
    seconds: Seconds | None,
) -> DataLoader:
    is_train = split == "train"
    micro_batch_size = args.micro_batch_size if is_train else args.eval_micro_batch_size
    sharding = Sharding(
        micro_batch_size, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    )
    return microbatches(
        stream,
        sharding=sharding,
        consumed=consumed,
        stop=stop,
        alignment=alignment(args.tensor_model_parallel_size),
        num_workers=args.num_workers,
        begin_worker=_worker_start(args),
        balance=Balance(batch_sizes(args), seconds) if seconds and is_train else None,
    )


def _packed(
    args,
    split: str,
    stream: Samples,
    *,
    consumed: int = 0,
    stop: int | None = None,
    costs: Costs | None,
    vp_stage: int | None,
) -> DataLoader:
    """Shares of global batches; every pipeline stage makes the same of them."""
    is_train = split == "train"
    sizes = batch_sizes(args) if is_train else BatchSizes.constant(args.eval_global_batch_size)
    stages = args.pipeline_model_parallel_size
    interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
    grid = Grid(
        p=args.tensor_model_parallel_size,
        hidden_size=args.hidden_size,
        num_replicas=mpu.get_data_parallel_world_size(),
        alignment=alignment(args.tensor_model_parallel_size),
        causal=args.paradyse_model == GPT,
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
        sizes=sizes,
        replica=mpu.get_data_parallel_rank(),
        alignment=grid.alignment,
        reads_tokens=is_first_or_last_pipeline_stage(vp_stage),
        objective=_objective(args, split, consumed, sizes),
    )
    return packed_shares(
        shares,
        consumed=consumed,
        stop=stop,
        sizes=sizes,
        num_workers=args.num_workers,
        begin_worker=_worker_start(args),
    )


def _worker_start(args) -> WorkerStart:
    """As of Megatron's own loader."""
    return functools.partial(begin_worker, args.exit_signal if args.exit_signal_handler else None)


def _objective(args, split: str, consumed: int, sizes: BatchSizes) -> Objective:
    if args.paradyse_model == GPT:
        return next_tokens
    if split != "train":
        return functools.partial(_masked, masking=masking_of(None))
    return functools.partial(
        _masked, masking=masking_of(args.iteration), consumed=consumed, sizes=sizes
    )


def _masked(
    sample: np.ndarray,
    first: int,
    *,
    masking: Masking,
    consumed: int = 0,
    sizes: BatchSizes | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Of a BERT's document, less its last token, which ends it. Alike at every first without sizes.

    consumed: the position at which the masking's iteration begins.
    """
    if sizes is not None:
        iteration = masking.iteration + sizes.count(consumed, first)
        masking = dataclasses.replace(masking, iteration=iteration)
    return mask_document(sample[:-1], masking)


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
