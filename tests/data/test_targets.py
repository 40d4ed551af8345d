"""PREFIX.targets: which tokens are learnt, on the disk and in samples."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data import targets
from megatron_paradyse.data.documents import DocumentDataset
from megatron_paradyse.data.packed import collate_row, next_tokens
from megatron_paradyse.data.targets import NO_LABEL, count_within
from megatron_paradyse.errors import UserError
from tests.data.preparing import prepare


@pytest.mark.parametrize("calls_before", [0, 1, 2, 3])
def test_an_interrupt_between_renames_leaves_no_tokens_without_their_targets(
    calls_before, tmp_path, monkeypatch
):
    replace, calls = os.replace, []

    def killed(*paths):
        if len(calls) == calls_before:
            os.unlink = lambda path: None  # a killed process removes nothing
            raise KeyboardInterrupt
        calls.append(replace(*paths))

    monkeypatch.setattr(os, "unlink", os.unlink)
    monkeypatch.setattr(os, "replace", killed)
    prepare(tmp_path, [{"q": "What? ", "a": "This."}], "--prompt-key", "q", "--key", "a")
    there = {path.suffix for path in tmp_path.glob("out.*")}
    assert len(there) == calls_before and (".bin" not in there or ".targets" in there)


@settings(max_examples=100)
@given(data=st.data())
def test_samples_say_what_is_learnt_of_each_piece_of_a_document(data, tmp_path_factory):
    """Against plain counting: pieces of long documents, those without a target left out."""
    from tests.train.harness import write_documents

    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    mark = st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))
    learnt = np.array(data.draw(mark))
    seq_length = data.draw(st.integers(1, 6))
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_documents(prefix, lengths)
    prefix.with_suffix(".targets").write_bytes(learnt.astype(np.uint8).tobytes())
    dataset = DocumentDataset(
        str(prefix), fraction=(0.0, 1.0), seq_length=seq_length, long_documents="split"
    )
    expected, left_out = [], 0
    for document, first in enumerate(np.cumsum([0, *lengths[:-1]])):
        tokens = dataset._indexed.get(document).tolist()
        for start in range(0, lengths[document] - 1, seq_length):
            stop = min(start + seq_length, lengths[document] - 1)
            marks = learnt[first + start + 1 : first + stop + 1]
            labels = np.where(marks, tokens[start + 1 : stop + 1], NO_LABEL).tolist()
            if marks.any():
                expected.append([tokens[start:stop], labels])
            else:
                left_out += 1
    samples = [dataset[i] for i in range(len(dataset))]
    read = [
        collate_row([next_tokens(sample, 0)], None, len(sample) - 1).tolist() for sample in samples
    ]
    assert read == expected
    assert dataset.samples.num_unlearnt == left_out
    assert dataset.num_learnt == sum(label != NO_LABEL for _, row in expected for label in row)
    assert [len(sample) - 1 for sample in samples] == dataset.lengths.tolist()


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 8])
def test_ranges_are_counted_to_the_very_end(block_bytes, monkeypatch):
    monkeypatch.setattr(targets, "BLOCK_BYTES", block_bytes)
    marks = np.array([0, 1, 1, 0, 1], dtype=np.uint8)
    starts, stops = np.array([0, 1, 3]), np.array([2, 4, 5])
    assert count_within(marks, starts, stops).tolist() == [1, 2, 1]
    assert count_within(marks, starts[:0], stops[:0]).tolist() == []


@pytest.mark.parametrize(
    "content, said",
    [
        (None, r"out\.targets cannot be read \(No such file or directory\): copy it there again"),
        (b"011", r"out\.targets has the value 48 for token 0: write bytes of 1, learnt, and 0"),
        (bytes([0, 1, 2]), r"out\.targets has the value 2 for token 2"),
    ],
)
def test_targets_that_cannot_be_read_or_are_no_marks_are_refused(
    content, said, tmp_path, monkeypatch
):
    """Also without the .json that would tell: they would be learnt, all of them."""
    monkeypatch.setattr(targets, "BLOCK_BYTES", 2)
    prefix, _ = prepare(tmp_path, [{"q": "a", "a": "b"}], "--prompt-key", "q", "--key", "a")
    for suffix in (".targets", ".json"):
        prefix.with_suffix(suffix).unlink()
    path = prefix.with_suffix(".targets")
    path.symlink_to("elsewhere") if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        DocumentDataset(str(prefix), fraction=(0.0, 1.0), seq_length=8, long_documents="split")


@pytest.mark.parametrize("missing", ["a byte", "the file"])
def test_targets_that_are_not_of_the_tokens_are_refused(missing, tmp_path):
    from megatron_paradyse.train.data_files import check_targets

    prefix, _ = prepare(tmp_path, [{"q": "a", "a": "b"}], "--prompt-key", "q", "--key", "a")
    path = prefix.with_suffix(".targets")
    if missing == "the file":
        path.unlink()
        with pytest.raises(UserError, match=r"out\.targets not found, which says which tokens"):
            check_targets([str(prefix)])
        return
    check_targets([str(prefix)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"out\.targets has 2 bytes, and .*out\.bin 3 tokens"):
        DocumentDataset(str(prefix), fraction=(0.0, 1.0), seq_length=8, long_documents="split")
