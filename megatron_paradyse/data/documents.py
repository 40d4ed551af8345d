"""A dataset where one document is one training sequence.

A document of t tokens has t - 1 next-token predictions. With --seq-length S it becomes
ceil((t - 1) / S) samples; sample k reads tokens [k S, min((k + 1) S, t - 1)] inclusive, so that
neighbours share one token, every prediction is made exactly once, and no sample has more than S
inputs. Documents of fewer than two tokens have nothing to predict and are left out, with a count;
so are samples in which no token is learnt, where the data set says which are (targets.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_paradyse.data import targets
from megatron_paradyse.data.index import read_index
from megatron_paradyse.errors import UserError

LARGEST_ID = np.iinfo(np.int32).max  # of a token: packed rows are int32


@dataclass(frozen=True)
class SampleTable:
    """Where each sample lies: three arrays of equal length.

    document: index of its document; start: its first token in that document; length: its number
    of inputs (it reads length + 1 tokens).
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    num_short: int  # documents left out: fewer than two tokens
    num_truncated: int  # documents that lost their tail
    num_unlearnt: int = 0  # samples left out: none of their tokens is learnt

    def __len__(self) -> int:
        return len(self.length)

    def chosen(self, learnt: np.ndarray) -> SampleTable:
        """The samples of which some tokens are learnt, learnt [samples] of them."""
        kept = learnt > 0
        columns = {name: getattr(self, name)[kept] for name in ("document", "start", "length")}
        return replace(self, **columns, num_unlearnt=len(self) - int(kept.sum()))


def build_sample_table(
    document_tokens: np.ndarray,
    *,
    seq_length: int,
    long_documents: str,
    first_document: int = 0,
    prefix: str = "the data",
) -> SampleTable:
    """Cut documents of the given token counts into samples of at most seq_length inputs.

    Raises UserError when long_documents is "refuse" and a document is too long.
    """
    predictions = document_tokens.astype(np.int64) - 1
    num_short = int((predictions < 1).sum())
    predictions = np.maximum(predictions, 0)
    too_long = np.flatnonzero(predictions > seq_length)
    if len(too_long) and long_documents == "refuse":
        worst = too_long[0]
        raise UserError(
            f"document {first_document + worst} of {prefix} has {int(predictions[worst]) + 1} "
            f"tokens, --seq-length {seq_length} takes {seq_length + 1}: raise --seq-length, or "
            "choose --paradyse-long-documents split or truncate"
        )
    num_truncated = 0
    if long_documents == "truncate":
        num_truncated = len(too_long)
        predictions = np.minimum(predictions, seq_length)
    pieces = -(-predictions // seq_length)
    document = np.repeat(np.arange(len(predictions)), pieces)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = piece * seq_length
    length = np.minimum(predictions[document] - start, seq_length)
    return SampleTable(document + first_document, start, length, num_short, num_truncated)


class DocumentDataset:
    """Samples of a contiguous range of documents of one Megatron .bin/.idx pair.

    Indexing gives the length + 1 tokens of a sample as an int64 array; ~token where PREFIX.targets
    says that a token is not learnt.
    """

    def __init__(
        self,
        prefix: str,
        *,
        fraction: tuple[float, float],
        seq_length: int,
        long_documents: str,
        mmap: bool = True,
    ):
        """fraction: the range of documents, as shares of their number, like Megatron's --split.

        mmap: the tokens are mapped into memory, else read document by document.
        """
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                raise UserError(
                    f"data file {prefix + suffix} not found: give --data-path the prefix that "
                    "'megatron-paradyse data prepare --output-prefix PREFIX' wrote, without .bin "
                    "or .idx"
                )
        if not os.path.getsize(f"{prefix}.bin"):
            raise UserError(
                f"{prefix}.bin is empty: leave it out of the data sets, or prepare it again"
            )
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        try:
            index = read_index(f"{prefix}.idx")  # Megatron trusts it
            self._indexed = IndexedDataset(prefix, mmap=mmap)
        except OSError as error:
            raise UserError(f"{prefix} cannot be read ({error}): prepare it again") from error
        _check_index(prefix, self._indexed)
        documents = index.document_lengths
        first, last = (round(share * len(documents)) for share in fraction)
        self._first_sequence = self._indexed.document_indices
        self.samples = build_sample_table(
            documents[first:last],
            seq_length=seq_length,
            long_documents=long_documents,
            first_document=first,
            prefix=prefix,
        )
        self.prefix = prefix
        self._targets = _targets(prefix, self._indexed, int(documents.sum()))
        self.num_learnt = int(self.samples.length.sum())  # predictions that count
        if self._targets is not None:
            self._first_token = np.concatenate([[0], np.cumsum(documents)])  # of each document
            starts = self._first_token[self.samples.document] + self.samples.start + 1
            stops = starts + self.samples.length
            learnt = targets.count_within(self._targets, starts, stops, prefix=prefix)
            self.samples = self.samples.chosen(learnt)
            self.num_learnt = int(learnt.sum())

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.length

    def __getitem__(self, index: int) -> np.ndarray:
        samples = self.samples
        document, start = int(samples.document[index]), int(samples.start[index])
        stop = start + int(samples.length[index]) + 1
        first = int(self._first_sequence[document])
        last = int(self._first_sequence[document + 1])
        if last == first + 1:
            tokens = self._indexed.get(first, offset=start, length=stop - start)
        else:
            tokens = np.concatenate([self._indexed.get(i) for i in range(first, last)])[start:stop]
        _check_ids(tokens, self.prefix, document)
        if self._targets is None:
            return tokens.astype(np.int64)
        begin = int(self._first_token[document])
        return targets.marked(tokens, self._targets[begin + start : begin + stop])


def _check_index(prefix: str, indexed) -> None:
    """UserError unless .bin holds all that the index lists, as integers."""
    lengths, pointers = indexed.sequence_lengths, indexed.index.sequence_pointers
    remedy = "prepare it again"
    if np.dtype(indexed.index.dtype).kind == "f":
        kind = np.dtype(indexed.index.dtype).name
        raise UserError(f"{prefix}.bin holds {kind}, and ids of tokens are integers: {remedy}")
    stops = pointers + lengths.astype(np.int64) * indexed.index.dtype_size
    size, listed = os.path.getsize(f"{prefix}.bin"), int(stops.max())
    if (pointers < 0).any() or (stops < pointers).any() or listed > size:
        raise UserError(
            f"{prefix}.bin has {size:,} bytes, and {prefix}.idx lists {listed:,}: one of them was "
            f"cut off or replaced: {remedy}"
        )


def _check_ids(tokens: np.ndarray, prefix: str, document: int) -> None:
    """UserError for what is no id of a token: one below 0 would be taken for a complement."""
    if tokens.dtype.kind == "u":
        return
    least, largest = tokens.min(), tokens.max()
    if least < 0 or largest > LARGEST_ID:
        raise UserError(
            f"{prefix}.bin has the token {least if least < 0 else largest} in document {document}: "
            f"tokens are ids from 0 to {LARGEST_ID}: prepare the data again"
        )


def _targets(prefix: str, indexed, num_tokens: int) -> targets.TargetArray | None:
    """PREFIX.targets, of tokens that lie in .bin one after the other; UserError if they do not."""
    found = targets.map_targets(prefix, num_tokens)
    if found is None:
        return None
    ends = np.cumsum(indexed.sequence_lengths, dtype=np.int64) * indexed.index.dtype_size
    if (indexed.index.sequence_pointers[1:] != ends[:-1]).any():
        raise UserError(
            f"{prefix}.idx lists sequences out of their order in {prefix}.bin, so that "
            f"{prefix}.targets cannot tell theirs: prepare it again"
        )
    return found


class SampleStream:
    """An endless, deterministic stream of samples over one or more datasets.

    Position k of the stream is always the same sample, so that a restart resumes at the exact one.
    Without weights the datasets are joined: an epoch runs through all of them once. With weights
    each dataset runs through its own epochs and the stream follows the weights.
    """

    def __init__(
        self,
        datasets: Sequence[DocumentDataset],
        *,
        weights: Sequence[float] | None,
        order: Callable[[np.ndarray, int], np.ndarray],
        num_samples: int,
        group: int = 1,
    ):
        """order(lengths, epoch) is a permutation of the samples.

        num_samples: that will be asked for; a blend beyond them grows, and stays the same up to
        them. group: so many samples in a row are of one dataset of the blend, as one draw by the
        weights.
        """
        self._datasets = list(datasets)
        self._order = order
        self._weights, self._group = weights or (), group
        self._epochs: dict[int, dict[int, np.ndarray]] = {}  # of a dataset: epoch -> its order
        if weights is None:
            self._lengths = [np.concatenate([d.lengths for d in self._datasets])]
            self._blend = None
        else:
            self._lengths = [d.lengths for d in self._datasets]
            self._blend = _blend(weights, num_samples, group)
        self._first = np.cumsum([0] + [len(d) for d in self._datasets])

    @property
    def epoch_size(self) -> int:
        """Samples of all data sets, each once."""
        return int(self._first[-1])

    def _locate(self, position: int) -> tuple[int, int]:
        """(dataset, index in it) of a stream position."""
        source, position_in_source = 0, position
        if self._blend is not None:
            if position >= len(self._blend[0]):
                self._blend = _blend(self._weights, 2 * (position + 1), self._group)
            source, position_in_source = (int(column[position]) for column in self._blend)
        epoch, rank = divmod(position_in_source, len(self._lengths[source]))
        index = int(self._order_in(source, epoch)[rank])
        if self._blend is not None:
            return source, index
        dataset = int(np.searchsorted(self._first, index, side="right")) - 1
        return dataset, index - int(self._first[dataset])

    def _order_in(self, source: int, epoch: int) -> np.ndarray:
        """Of a source the last two are remembered: a global batch may lie in both, in any order."""
        known, lengths = self._epochs.setdefault(source, {}), self._lengths[source]
        found = known.pop(epoch, None)
        if found is None:
            if len(known) > 1:
                del known[next(iter(known))]
            found = self._order(lengths, epoch).astype(np.min_scalar_type(len(lengths)))
        known[epoch] = found  # the last of the dict is the last used
        return found

    def length(self, position: int) -> int:
        """Inputs that count in the sample at a position."""
        dataset, index = self._locate(position)
        return int(self._datasets[dataset].lengths[index])

    def tokens(self, position: int) -> np.ndarray:
        dataset, index = self._locate(position)
        return self._datasets[dataset][index]


def _blend(weights: Sequence[float], num_samples: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, its running count) of at least num_samples positions, in groups by the weights."""
    from megatron.core.datasets import helpers

    shares = np.asarray(weights, dtype=np.float64)
    num_groups = -(-num_samples // group)
    sources = np.zeros(num_groups, dtype=np.int16)
    counts = np.zeros(num_groups, dtype=np.int64)
    helpers.build_blending_indices(
        sources, counts, shares / shares.sum(), len(shares), num_groups, False
    )
    positions = counts[:, None] * group + np.arange(group)
    return sources.repeat(group), positions.reshape(-1)
