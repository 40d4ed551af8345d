"""FASTA: the bases of a plain parser whatever the blocks, exact lines in errors, bounded memory."""

import codecs
import gzip
import re
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_paradyse.data.fasta import MAX_HEADER_BYTES, FastaSource
from megatron_paradyse.data.prepare import prepare
from megatron_paradyse.data.tokenizers import KmerTokenizer
from megatron_paradyse.errors import UserError
from tests.data.preparing import documents

LINES = st.lists(
    st.one_of(
        st.text(alphabet=">ACG x", max_size=8).map(lambda text: ">" + text),
        st.text(alphabet="ACGTNacgtn \t\r\v\f", max_size=12),
    ),
    max_size=12,
)


def reference(path: str, text: str) -> list[tuple[str, bytes]]:
    """One record at a time, line by line."""
    records: list[tuple[str, bytes]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith(">"):
            records.append((f"{path}:{number}", b""))
        else:
            place, bases = records[-1]
            records[-1] = (place, bases + re.sub(r"\s", "", line).encode())
    return records


@given(lines=LINES, block_bytes=st.integers(1, 40), final=st.sampled_from(["", "\n"]))
@example(lines=["A", ">", ">b", "C"], block_bytes=1, final="")
def test_records_equal_a_plain_parser_whatever_the_blocks(
    tmp_path_factory, lines, block_bytes, final
):
    path = tmp_path_factory.mktemp("fasta") / "x.fa"
    text = "\n".join([">first", *lines]) + final
    path.write_bytes(text.encode())
    source = FastaSource([str(path)], block_bytes=block_bytes)
    assert documents(source) == reference(str(path), text)
    assert source.read_bytes == source.total_bytes


@given(bases=st.text(alphabet="ACGTn"), split=st.integers(1, 9), block_bytes=st.integers(1, 30))
def test_split_records_join_to_the_whole(tmp_path_factory, bases, split, block_bytes):
    path = tmp_path_factory.mktemp("fasta") / "x.fa"
    path.write_text(f">a\n{bases}\n>b\n{bases[:5]}\n")
    source = FastaSource([str(path)], split_bases=split, block_bytes=block_bytes)
    pieces = documents(source)
    for line, whole in ((f"{path}:1", bases), (f"{path}:3", bases[:5])):
        parts = [data for place, data in pieces if place == line]
        assert b"".join(parts) == whole.encode()
        assert all(len(part) == split for part in parts[:-1])
        assert len(parts) == max(1, -(-len(whole) // split))


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_a_mark_of_utf_8_before_the_first_record_and_ends_of_lines_change_nothing(
    tmp_path, block_bytes
):
    path = tmp_path / "x.fa"
    path.write_bytes(codecs.BOM_UTF8 + b">a\r\nACGT\r\nAC\r\n>b\r\nGG\r\n")
    found = documents(FastaSource([str(path)], block_bytes=block_bytes))
    assert found == [(f"{path}:1", b"ACGTAC"), (f"{path}:4", b"GG")]


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_a_foreign_letter_is_named_with_its_line(tmp_path, block_bytes):
    path = tmp_path / "x.fa"
    path.write_text(">a\nACGT\n\nACGT\nACEGT\nAXT\n")
    with pytest.raises(UserError, match=r"x\.fa:5: the letter 'E' is no nucleotide"):
        documents(FastaSource([str(path)], block_bytes=block_bytes))


def test_what_is_no_fasta_is_refused(tmp_path):
    path = tmp_path / "x.fa"
    path.write_text("\n\nACGT\n>a\n")
    with pytest.raises(UserError, match=r"x\.fa:3: sequence before the first line"):
        documents(FastaSource([str(path)]))
    path.write_text(">" + "h" * (4 * MAX_HEADER_BYTES))
    with pytest.raises(UserError, match=r"x\.fa:1: a header longer than 64 KiB"):
        documents(FastaSource([str(path)]))
    path.write_bytes(b">a\nAC\n>b\rACGT\r>c\rACGT\r>d\nACGT\n")  # of b and c nothing would be left
    with pytest.raises(UserError, match=r"x\.fa:3: lines that end in a carriage return alone"):
        documents(FastaSource([str(path)]))
    with pytest.raises(UserError, match="--split-bases 0"):
        FastaSource([str(path)], split_bases=0)


@pytest.mark.parametrize("wrapped", [True, False])
def test_memory_does_not_grow_with_a_record(tmp_path, wrapped):
    """30 million bases, wrapped or on one line: below 12 MiB, where the text alone is 30."""
    path = tmp_path / "x.fa.gz"
    line = b"ACGTNacgtn" * 6 + (b"\n" if wrapped else b"")
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(b">chr\n")
        for _ in range(500):
            stream.write(line * 1000)
    # The import of torch is not what is measured.
    import megatron.core.datasets.indexed_dataset  # noqa: F401

    tracemalloc.start()
    try:
        metadata = prepare(FastaSource([str(path)]), KmerTokenizer(), str(tmp_path / "out"))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert metadata.num_tokens == 10_000_000 + 1
    assert peak_bytes < 12 << 20
