"""Read the lengths in Megatron's .idx, without torch and without trusting the file.

The layout (megatron.core.datasets.indexed_dataset, version 1, little-endian):

    9 bytes   MMIDIDX and two zero bytes      n x int32   tokens of each sequence
    uint64    version, 1                      n x int64   byte offset of each sequence in .bin
    uint8     code of the token dtype         m x int64   first sequence of each document, and n
    uint64    n, number of sequences
    uint64    m, number of documents + 1
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_paradyse.data.metadata import strip_suffix
from megatron_paradyse.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = range(1, 9)


@dataclass(frozen=True)
class DatasetIndex:
    """What .idx says of a data set, mapped from the file: tokens of each sequence, and of each
    document the first sequence, with their number at the end."""

    prefix: str
    sequence_lengths: np.ndarray[Any, np.dtype[np.int32]]
    first_sequences: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def num_documents(self) -> int:
        return len(self.first_sequences) - 1

    @property
    def document_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each document, of one sequence or several: what training takes as one."""
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.diff(ends[self.first_sequences])


def read_index(prefix: str | os.PathLike[str]) -> DatasetIndex:
    """Map PREFIX.idx; where sequences lie in .bin is not read.

    Raises UserError when the file is missing, is none of Megatron's, has another size than its
    counts say, or documents that are not of its sequences.
    """
    root = strip_suffix(prefix)
    path = root + ".idx"
    if not os.path.isfile(path):
        raise UserError(
            f"{path} does not exist: give the prefix of a .bin and .idx pair, or make one with "
            "megatron-paradyse data prepare"
        )
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise UserError(f"{path}: {size} bytes are too few for an index: prepare the data again")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if magic != MAGIC or version != 1 or code not in DTYPE_CODES:
        raise UserError(f"{path} is no index of Megatron (version 1): prepare the data again")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    # Multimodal data sets add one byte per sequence.
    if size not in (expected, expected + num_sequences) or num_boundaries < 1:
        raise UserError(
            f"{path}: {size} bytes where its counts need {expected}: it is damaged or unfinished, "
            "prepare the data again"
        )
    if num_sequences == 0:
        raise UserError(f"{path} holds no documents: prepare the data again")
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(num_sequences,))
    if int(lengths.min()) < 0:
        raise UserError(f"{path}: a negative length: it is damaged, prepare the data again")
    place = HEADER.size + 12 * num_sequences
    firsts = np.memmap(path, dtype="<i8", mode="r", offset=place, shape=(num_boundaries,))
    if firsts[0] != 0 or firsts[-1] != num_sequences or bool((np.diff(firsts) < 0).any()):
        raise UserError(
            f"{path}: its documents are not of its {num_sequences:,} sequences: it is damaged, "
            "prepare the data again"
        )
    return DatasetIndex(root, lengths, firsts)
