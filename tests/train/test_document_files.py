"""The files of a data set: what lies in them is read, and what cannot be is named."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_paradyse.data.documents import DocumentDataset
from megatron_paradyse.data.targets import ids_of
from megatron_paradyse.errors import UserError
from tests.train.harness import write_documents

LENGTHS = [1, 2, 3, 17, 64, 65, 66, 200, 9, 31, 5, 129, 40, 40, 40, 7]


@pytest.mark.parametrize(
    ("dtype", "token", "said"),
    [
        (np.int32, -3, r"has the token -3 in document 2: tokens are ids from 0 to 2147483647"),
        (np.int64, 2**32 + 5, r"has the token 4294967301 in document 2: tokens are ids from 0"),
        (np.float32, 5, r"holds float32, and ids of tokens are integers: prepare it again"),
        (np.int64, 2**31 - 1, None),
    ],
)
@pytest.mark.parametrize("learns_all", [True, False])
def test_what_is_no_id_of_a_token_is_refused(learns_all, dtype, token, said, tmp_path):
    """A negative one would be read as a token that is not learnt, a large one cut to 32 bits."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    for tokens in ([1, 2], [3, 4], [5, token, 6]):
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(str(tmp_path / "a.idx"))
    if not learns_all:
        (tmp_path / "a.targets").write_bytes(bytes([0, 1, 0, 1, 0, 0, 1]))
    whole = {"fraction": (0.0, 1.0), "seq_length": 64, "long_documents": "split"}
    with contextlib.nullcontext() if said is None else pytest.raises(UserError, match=said):
        read = DocumentDataset(str(tmp_path / "a"), **whole)
        assert read[0].tolist() == ([1, 2] if learns_all else [~1, 2])
        assert ids_of(read[2]).tolist() == [5, token, 6]


def test_a_missing_file_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.idx not found.*data prepare"):
        DocumentDataset(
            str(tmp_path / "nothing"), fraction=(0.0, 1.0), seq_length=8, long_documents="split"
        )


def damaged(tmp_path, suffix, change):
    write_documents(tmp_path / "corpus", LENGTHS)
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(change(path.read_bytes()))
    return DocumentDataset(
        str(tmp_path / "corpus"), fraction=(0, 1), seq_length=64, long_documents="split"
    )


def test_a_bin_that_was_cut_off_is_told_before_anything_is_read(tmp_path):
    total = sum(LENGTHS)
    with pytest.raises(UserError, match=rf"corpus.bin has 100 bytes, and .*lists {total}: "):
        damaged(tmp_path, ".bin", lambda content: content[:100])


@pytest.mark.parametrize(
    "suffix, size, said",
    [
        (".idx", 8, r"corpus\.idx: 8 bytes are too few for an index: prepare"),
        (".idx", 20, r"corpus\.idx: 20 bytes are too few for an index: prepare"),
        (".idx", 100, r"corpus\.idx: 100 bytes where its counts need 362: it is damaged"),
        (".bin", 0, r"corpus\.bin is empty: leave it out of the data sets, or prepare it again"),
    ],
)
def test_a_file_that_was_cut_off_is_the_one_that_is_named(suffix, size, said, tmp_path):
    with pytest.raises(UserError, match=said):
        damaged(tmp_path, suffix, lambda content: content[:size])


@pytest.mark.parametrize("place", ["lengths", "pointers", "documents"])
def test_an_index_whose_numbers_make_no_sense_is_refused(place, tmp_path):
    """After a head of 34 bytes: int32 lengths, int64 pointers, int64 documents."""
    count = len(LENGTHS)
    start = 34 + {"lengths": 0, "pointers": 4 * count, "documents": 12 * count}[place] + 8
    with pytest.raises(UserError, match=r"corpus\.idx"):
        damaged(tmp_path, ".idx", lambda content: _overwritten(content, start, b"\xff" * 8))


def _overwritten(content: bytes, start: int, new: bytes) -> bytes:
    return content[:start] + new + content[start + len(new) :]


@pytest.mark.parametrize("learns_all", [True, False])
def test_a_document_is_its_sequences_wherever_they_lie(learns_all, tmp_path):
    """One of two sequences, and one of none; PREFIX.targets can only tell of tokens in order."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5, 6]), [3, 3])
    builder.add_document(torch.tensor([], dtype=torch.int64), [])
    builder.add_document(torch.tensor([7, 8]), [2])
    builder.finalize(str(tmp_path / "a.idx"))
    if not learns_all:
        (tmp_path / "a.targets").write_bytes(bytes([1, 1, 0, 1, 1, 0, 1, 1]))
    whole = {"fraction": (0.0, 1.0), "seq_length": 4, "long_documents": "split"}
    read = DocumentDataset(str(tmp_path / "a"), **whole)
    pieces = [[1, 2, 3, 4, 5], [5, 6], [7, 8]] if learns_all else [[1, 2, ~3, 4, 5], [7, 8]]
    assert [read[i].tolist() for i in range(len(read))] == pieces
    index = (tmp_path / "a.idx").read_bytes()
    swapped = index[46 + 8 : 46 + 16] + index[46 : 46 + 8]  # of three pointers, after the lengths
    (tmp_path / "a.idx").write_bytes(_overwritten(index, 46, swapped))
    said = r"a\.idx lists sequences out of their order in .*a\.bin, so that .*a\.targets cannot"
    with contextlib.nullcontext() if learns_all else pytest.raises(UserError, match=said):
        read = DocumentDataset(str(tmp_path / "a"), **whole)
        assert [read[i].tolist() for i in range(3)] == [[4, 5, 6, 1, 2], [2, 3], [7, 8]]
    (tmp_path / "a.bin").write_bytes(bytes(14))  # less the last token of two bytes
    with pytest.raises(UserError, match=r"a\.bin has 14 bytes, and .*a\.idx lists 16: one of them"):
        DocumentDataset(str(tmp_path / "a"), **whole)
