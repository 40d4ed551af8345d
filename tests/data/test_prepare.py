"""prepare: what goes in is what Megatron reads back, and a failure leaves nothing behind."""

import json
import os
import stat
import sysconfig

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.index import read_index
from megatron_paradyse.data.metadata import read_metadata
from megatron_paradyse.data.prepare import prepare
from megatron_paradyse.data.sources import Chunk, JsonlSource, TextSource, TreeSource
from megatron_paradyse.data.tokenizers import BytesTokenizer, KmerTokenizer
from megatron_paradyse.data.writer import DatasetWriter, smallest_dtype
from megatron_paradyse.errors import UserError
from tests.full_disk import largest_file

STDLIB = sysconfig.get_paths()["stdlib"]


class ListSource(TextSource):
    """Documents from a list of lists of chunks; an exception in a document's place is raised."""

    kind = "tree"
    total_bytes = read_bytes = 0

    def __init__(self, documents):
        self.texts = documents

    def chunks(self):
        for number, document in enumerate(self.texts):
            if isinstance(document, BaseException):
                raise document
            for data in document:
                yield Chunk(number, f"list:{number}", data)

    def parameters(self):
        return {}


def megatron_reads(prefix) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.binary(), min_size=1), min_size=1, max_size=6),
    append_eod=st.booleans(),
)
def test_megatron_reads_back_every_document(tmp_path, documents, append_eod):
    prefix = tmp_path / "out"
    texts = [b"".join(document) for document in documents]
    end = [256] if append_eod else []
    expected = [list(text) + end for text in texts if text]
    run = dict(append_eod=append_eod, overwrite=True)
    if not expected:
        with pytest.raises(UserError, match="holds no document with a token"):
            prepare(ListSource(documents), BytesTokenizer(), str(prefix), **run)
        return
    metadata = prepare(ListSource(documents), BytesTokenizer(), str(prefix), **run)
    assert megatron_reads(prefix) == expected
    assert metadata == read_metadata(prefix)
    assert metadata.append_eod is append_eod
    assert metadata.num_empty_documents == len(texts) - len(expected)
    lengths = read_index(prefix).sequence_lengths.tolist()
    assert lengths == [len(tokens) for tokens in expected]
    assert metadata.max_document_tokens == max(lengths)
    assert metadata.num_tokens == sum(lengths)


def test_the_smallest_dtype_that_holds_the_vocabulary():
    sizes = {2: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "int32"}
    for vocab_size, dtype in sizes.items():
        assert np.dtype(smallest_dtype(vocab_size)).name == dtype
        assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize(
    "failure",
    [UserError("bad input"), KeyboardInterrupt(), OSError(28, "No space left"), SystemExit()],
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path, failure, existing):
    prefix = tmp_path / "out"
    if existing:
        prepare(ListSource([[b"old"]]), BytesTokenizer(), str(prefix))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(type(failure)):
        prepare(
            ListSource([[b"new"], [b"x" * 100_000], failure]),
            BytesTokenizer(),
            str(prefix),
            overwrite=True,
        )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


CANNOT = r"^\S+/out\.bin cannot be written: {}: choose another place, or make room there$"


def test_a_failure_of_the_last_step_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=CANNOT.format("No space left on device")):
        prepare(ListSource([[b"x"]]), BytesTokenizer(), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [100_000, 10])
def test_a_full_disk_is_told_with_the_name_that_was_given(tmp_path, num_bytes):
    """While documents are written, and when what is buffered of them is; not as a fault of one."""
    with largest_file(8), pytest.raises(UserError, match=CANNOT.format("File too large")):
        prepare(ListSource([[b"x" * num_bytes]]), BytesTokenizer(), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_with_its_data_set(tmp_path):
    with pytest.raises(UserError, match=CANNOT.format("File name too long")):
        DatasetWriter(str(tmp_path / ("n" * 300) / "out"), 10)


def test_a_folder_whose_names_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    """As of some file systems: the data set is there, whole."""
    fsync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    prepare(ListSource([[b"x"]]), BytesTokenizer(), str(tmp_path / "out"))
    assert megatron_reads(tmp_path / "out") == [[*b"x", 256]]


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_an_interrupt_between_renames_leaves_nothing(tmp_path, monkeypatch, calls_before):
    replace, calls = os.replace, []

    def interrupted(*paths):
        if len(calls) == calls_before:
            raise KeyboardInterrupt
        calls.append(replace(*paths))

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(ListSource([[b"x"]]), BytesTokenizer(), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_data_set_is_replaced_only_when_asked(tmp_path):
    prefix = str(tmp_path / "new_folder" / "out")
    prepare(ListSource([[b"old"]]), BytesTokenizer(), prefix)
    with pytest.raises(UserError, match=r"out\.bin exists.*--overwrite"):
        prepare(ListSource([[b"new"]]), BytesTokenizer(), prefix)
    prepare(ListSource([[b"new"]]), BytesTokenizer(), prefix, overwrite=True)
    assert megatron_reads(prefix) == [[*b"new", 256]]
    with pytest.raises(UserError, match="is a folder"):
        DatasetWriter(str(tmp_path) + "/", 10)


def test_empty_documents_are_counted_or_an_error_with_their_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n')
    metadata = prepare(JsonlSource([str(path)]), BytesTokenizer(), str(tmp_path / "out"))
    assert (metadata.num_documents, metadata.num_empty_documents) == (1, 1)
    with pytest.raises(UserError, match=r"x\.jsonl:2: an empty document"):
        prepare(JsonlSource([str(path)]), BytesTokenizer(), str(tmp_path / "b"), strict=True)


def test_a_tokenizer_error_gets_the_place_of_its_document(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "ACG"}\n{"text": "hello"}\n')
    with pytest.raises(UserError, match=r"^\S+x\.jsonl:2: 'e' is no nucleotide"):
        prepare(JsonlSource([str(path)]), KmerTokenizer(), str(tmp_path / "out"))


def test_options_that_cannot_be_are_refused(tmp_path):
    tokenizer = BytesTokenizer()
    with pytest.raises(UserError, match="--max-documents 0"):
        prepare(ListSource([[b"x"]]), tokenizer, str(tmp_path / "out"), max_documents=0)
    tokenizer.eod = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="--no-append-eod"):
        prepare(ListSource([[b"x"]]), tokenizer, str(tmp_path / "out"))


def test_a_document_longer_than_the_index_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_paradyse.data.writer.MAX_DOCUMENT_TOKENS", 10)
    with pytest.raises(UserError, match=r"list:1: a document of more than 10 tokens"):
        prepare(ListSource([[b"x" * 9], [b"x" * 11]]), BytesTokenizer(), str(tmp_path / "out"))


def test_the_standard_library_becomes_a_corpus_the_same_twice(tmp_path):
    contents = []
    for name in ("a", "b"):
        source = TreeSource([STDLIB], exclude=["site-packages", "__pycache__", "test", "idlelib"])
        metadata = prepare(source, BytesTokenizer(), str(tmp_path / name), max_documents=200)
        contents.append([(tmp_path / f"{name}{s}").read_bytes() for s in (".bin", ".idx", ".json")])
    assert contents[0] == contents[1]
    assert metadata.num_documents == 200
    # Documents from under 100 to over 8,000 tokens, as training on them needs.
    lengths = read_index(tmp_path / "a").sequence_lengths
    assert lengths.min() < 1000 and lengths.max() > 8000
    first = bytes(megatron_reads(tmp_path / "a")[0][:-1])
    with open(os.path.join(STDLIB, "__future__.py"), "rb") as stream:
        assert first == stream.read()
    assert STDLIB not in json.dumps(json.loads((tmp_path / "a.json").read_text()))
