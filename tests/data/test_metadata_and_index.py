"""PREFIX.json and PREFIX.idx: strict reading, and one-line errors for whatever they hold."""

import dataclasses
import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.index import HEADER, MAGIC, read_index
from megatron_paradyse.data.lengths import summarize
from megatron_paradyse.data.metadata import DatasetMetadata, read_metadata
from megatron_paradyse.errors import UserError

GOOD = DatasetMetadata(
    tokenizer="kmer",
    tokenizer_parameters={"k": 3},
    vocab_size=86,
    eod=85,
    append_eod=True,
    dtype="uint8",
    num_documents=2,
    num_tokens=7,
    max_document_tokens=5,
    num_empty_documents=0,
    source="fasta",
    source_parameters={"split_bases": None},
)


def index_of(lengths, *, boundaries=None, extra=b"") -> bytes:
    lengths = np.array(lengths, dtype="<i4")
    boundaries = range(len(lengths) + 1) if boundaries is None else boundaries
    return (
        HEADER.pack(MAGIC, 1, 8, len(lengths), len(boundaries))
        + lengths.tobytes()
        + np.zeros(len(lengths), dtype="<i8").tobytes()
        + np.array(boundaries, dtype="<i8").tobytes()
        + extra
    )


def write_index(path, *of, **more):
    path.write_bytes(index_of(*of, **more))


@st.composite
def spoilt_index(draw) -> bytes:
    """With one byte changed, at most."""
    content = bytearray(index_of(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))))
    content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx", ".json", ".targets"])
def test_metadata_is_read_by_prefix_or_file(tmp_path, suffix):
    (tmp_path / "a.b.json").write_text(GOOD.to_json())
    assert read_metadata(str(tmp_path / "a.b") + suffix) == GOOD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version must be 1, got 2"),
        ({"schema_version": True}, "schema_version must be 1, got True"),
        ({"vocab_size": None}, "vocab_size must be int, got None"),
        ({"vocab_size": True}, "vocab_size must be int, got True"),
        ({"vocab_size": 85}, "eod must be below vocab_size=85, got 85"),
        ({"eod": -1}, "eod must be below"),
        ({"eod": None}, "append_eod is true but eod is null"),
        ({"eod": "85"}, "eod must be int or null, got '85'"),
        ({"dtype": "int4"}, "dtype must be one of uint8, uint16, int32"),
        ({"source": "web"}, "source must be one of"),
        ({"num_tokens": 1}, "cannot be true together"),
        ({"max_document_tokens": 8}, "cannot be true together"),
        ({"num_documents": 8}, "cannot be true together"),
        ({"num_documents": 0}, "cannot be true together"),
        ({"num_empty_documents": -1}, "num_empty_documents is -1"),
        ({"num_target_tokens": 0}, "num_target_tokens is 0 of num_tokens=7"),
        ({"num_target_tokens": 8}, "num_target_tokens is 8 of num_tokens=7"),
        ({"vocab_size": 0, "eod": None, "append_eod": False}, "vocab_size must be at least 1"),
        ({"surprise": 1}, "has unknown 'surprise'"),
        ({"tokenizer": ...}, "lacks tokenizer"),
    ],
)
def test_metadata_that_is_wrong_is_refused_with_its_key(tmp_path, change, message):
    values = {**dataclasses.asdict(GOOD), **change}
    values = {key: value for key, value in values.items() if value is not ...}
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_metadata(tmp_path / "a")


def test_metadata_that_is_absent_or_huge_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.json does not exist.*data prepare"):
        read_metadata(tmp_path / "a")
    (tmp_path / "a.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_metadata(tmp_path / "a")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
            lambda inner: st.dictionaries(
                st.sampled_from(sorted(dataclasses.asdict(GOOD))) | st.text(), inner
            ),
        ).map(lambda value: json.dumps(value).encode()),
        st.dictionaries(
            st.sampled_from(sorted(dataclasses.asdict(GOOD))),
            st.none() | st.integers() | st.text() | st.just({}),
        ).map(lambda some: json.dumps({**dataclasses.asdict(GOOD), **some}).encode()),
    )
)
def test_any_metadata_is_read_or_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    try:
        assert isinstance(read_metadata(tmp_path / "a"), DatasetMetadata)
    except UserError as error:
        assert len(str(error)) < 1000


def test_lengths_are_read_from_an_index_of_megatron(tmp_path):
    write_index(tmp_path / "a.idx", [5, 2, 9], boundaries=[0, 2, 3])
    index = read_index(tmp_path / "a")
    assert index.sequence_lengths.tolist() == [5, 2, 9]
    assert index.num_documents == 2 and index.document_lengths.tolist() == [7, 9]
    write_index(tmp_path / "empty.idx", [5, 2], boundaries=[0, 0, 2, 2])
    assert read_index(tmp_path / "empty").document_lengths.tolist() == [0, 7, 0]
    write_index(tmp_path / "multimodal.idx", [5, 2], extra=b"\0\0")
    assert read_index(tmp_path / "multimodal.idx").sequence_lengths.tolist() == [5, 2]


def test_a_document_of_several_sentences_counts_as_one_sequence(tmp_path):
    """As in training."""
    write_index(tmp_path / "a.idx", [4, 3000, 2000, 9], boundaries=[0, 3, 4])
    summary = summarize(read_index(tmp_path / "a"))
    assert summary.bucket_sequences[:2] == (1, 1) and summary.bucket_tokens[:2] == (9, 5004)
    assert (summary.num_sequences, summary.median_tokens) == (2, 2506.5)
    assert (summary.min_tokens, summary.max_tokens) == (9, 5004)
    assert summary.token_percent[:2] == pytest.approx((900 / 5013, 500400 / 5013))


def test_tokens_beyond_32_bits_are_added_up(tmp_path):
    longest = 2**31 - 1
    write_index(tmp_path / "a.idx", [longest] * 3, boundaries=[0, 1, 3])
    summary = summarize(read_index(tmp_path / "a"))
    assert summary.num_tokens == summary.bucket_tokens[-1] == 3 * longest
    assert summary.max_tokens == 2 * longest


def test_a_damaged_index_is_refused(tmp_path):
    path = tmp_path / "a.idx"
    with pytest.raises(UserError, match="does not exist"):
        read_index(path)
    cases = {
        "are too few": b"MMIDIDX",
        "no index of Megatron": b"\0" * 50,
        r"no index of Megatron \(version 1\)": HEADER.pack(MAGIC, 2, 8, 1, 2) + bytes(28),
        "is no index of Megatron": HEADER.pack(MAGIC, 1, 9, 1, 2) + bytes(28),
        "is damaged or unfinished": HEADER.pack(MAGIC, 1, 8, 2**63, 2**63),
        "holds no documents": HEADER.pack(MAGIC, 1, 8, 0, 1) + struct.pack("<q", 0),
    }
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_index(path)
    write_index(path, [3, -1])
    with pytest.raises(UserError, match="a negative length"):
        read_index(path)
    for boundaries in ([1, 2], [0, 1], [0, 2, 1, 2], [0, 3]):
        write_index(path, [3, 1], boundaries=boundaries)
        with pytest.raises(UserError, match="documents are not of its 2 sequences"):
            read_index(path)
    write_index(path, [3, 1], extra=b"\0")
    with pytest.raises(UserError, match="is damaged or unfinished"):
        read_index(path)


COUNTS = st.integers(0, 4) | st.integers(0, 2**64 - 1)
NO_INDEX = st.builds(
    lambda code, counts, rest: HEADER.pack(MAGIC, 1, code, *counts) + rest,
    st.integers(0, 255),
    st.tuples(COUNTS, COUNTS),
    st.binary(max_size=90),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=NO_INDEX | spoilt_index())
@example(content=index_of([5, 2, 9], boundaries=[0, 2, 3]))
def test_any_index_is_read_or_refused(tmp_path, content):
    (tmp_path / "a.idx").write_bytes(content)
    try:
        summary = summarize(read_index(tmp_path / "a"))
    except UserError as error:
        assert "prepare the data again" in str(error)
    else:
        assert sum(summary.bucket_sequences) == summary.num_sequences
