"""Trees and JSONL: the documents that are there, in a fixed order, and errors with their place."""

import codecs
import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_paradyse.data.sources import CHUNK_BYTES, JsonlSource, TreeSource
from megatron_paradyse.errors import UserError
from tests.data.preparing import documents


def write(path, content: bytes | str = "x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_tree_is_sorted_filtered_and_never_leaves_its_root(tmp_path):
    root = tmp_path / "root"
    for name in (
        "b/z.py",
        "b/a.py",
        "a.py",
        "B.py",
        "c.txt",
        "site-packages/q.py",
        "b/__pycache__/r.py",
    ):
        write(root / name, name)
    outside = write(tmp_path / "outside" / "secret.py")
    os.symlink(outside, root / "link.py")
    os.symlink(tmp_path / "outside", root / "linked")
    os.mkfifo(root / "pipe.py")
    source = TreeSource([str(root)])
    assert [os.path.relpath(place, root) for place, _ in documents(source)] == [
        "B.py",  # by their bytes, alike on every machine
        "a.py",
        "b/a.py",
        "b/z.py",
    ]
    assert source.read_bytes == source.total_bytes == len("B.pya.pyb/a.pyb/z.py")


def test_tree_takes_suffixes_excludes_and_single_files(tmp_path):
    write(tmp_path / "x" / "a.md")
    write(tmp_path / "x" / "old" / "b.md")
    single = write(tmp_path / "y.any")
    source = TreeSource([str(tmp_path / "x"), single], suffixes=[".md"], exclude=["old"])
    assert [os.path.basename(place) for place, _ in documents(source)] == ["a.md", "y.any"]
    for pattern, count in (("old/*.md", 1), ("A.md", 2)):
        found = TreeSource([str(tmp_path / "x")], suffixes=[".md"], exclude=[pattern])
        assert len(documents(found)) == count


def test_tree_keeps_any_bytes_and_files_larger_than_a_chunk(tmp_path):
    content = bytes(range(256)) * (CHUNK_BYTES // 256) * 2 + b"\xff\x00"
    write(tmp_path / "a.py", content)
    write(tmp_path / "b.py", b"")
    assert [data for _, data in documents(TreeSource([str(tmp_path)]))] == [content, b""]


def test_tree_without_files_or_root_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no file ends in \.py.*--suffix"):
        documents(TreeSource([str(tmp_path)]))
    with pytest.raises(UserError, match="nowhere does not exist"):
        TreeSource([str(tmp_path / "nowhere")])


@given(texts=st.lists(st.text(), min_size=1))
def test_jsonl_gives_back_every_text(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    source = JsonlSource([str(path)])
    expected = [text.encode("utf-8", errors="surrogatepass") for text in texts]
    assert [data for _, data in documents(source)] == expected
    assert source.read_bytes == source.total_bytes


@pytest.mark.parametrize("first", [b"", b"\n", b" \r\n\n"])
def test_jsonl_may_begin_with_a_byte_order_mark_before_whatever_line(first, tmp_path):
    path = write(tmp_path / "a.jsonl", codecs.BOM_UTF8 + first + b'{"text": "a"}\n')
    place = f"{path}:{first.count(b'\n') + 1}"
    assert documents(JsonlSource([path])) == [(place, b"a")]


def test_what_is_read_of_several_files_is_added_up(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", f'{{"text": "{name}"}}\n') for name in ("a", "bc")]
    source = JsonlSource(paths)
    assert documents(source) == [(f"{paths[0]}:1", b"a"), (f"{paths[1]}:1", b"bc")]
    assert source.read_bytes == source.total_bytes == 29


def test_jsonl_passes_over_blank_lines_and_takes_half_a_surrogate_pair(tmp_path):
    path = write(tmp_path / "x.jsonl", '\n{"t": "a"}\n  \n{"t": "\\ud800"}')
    assert documents(JsonlSource([path], key="t")) == [
        (f"{path}:2", b"a"),
        (f"{path}:4", b"\xed\xa0\x80"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"not a JSON object on one line \(.*\): write one object a line, such as"),
        (b"\xff", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not a JSON object"),
        (b"[1]", r'a list where an object is needed: write one object a line, such as {"text": "'),
        (b"null", "null where an object is needed: write one"),
        (b'{"body": "x", "id": 1}', r"no key 'text' \(keys: body, id\): name it with --key"),
        (b'{"text": 5}', "'text' holds a number where text is needed: name the key .* --key, or"),
        (b"x" * 2001, "not a JSON object|longer than"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "x.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"x\.jsonl:2: ({message})"):
        documents(JsonlSource([path]))


def test_jsonl_lines_are_bounded(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"text": "' + b"x" * 5000)
    with pytest.raises(UserError, match=r"x\.jsonl:1: a line longer than"):
        documents(JsonlSource([path], max_line_bytes=4096))


def test_gzip_is_told_by_its_suffix_in_either_case(tmp_path):
    path = write(tmp_path / "x.JSONL.GZ", gzip.compress(b'{"text": "a"}\n'))
    assert documents(JsonlSource([path])) == [(f"{path}:1", b"a")]


def test_damaged_gzip_names_the_file(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, content in (("cut", whole[:-20]), ("flipped", whole[:30] + b"zz" + whole[32:])):
        path = write(tmp_path / f"{name}.jsonl.gz", content)
        with pytest.raises(UserError, match=rf"{name}\.jsonl\.gz: damaged gzip data"):
            documents(JsonlSource([path]))


def test_missing_files_and_folders_are_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        JsonlSource([str(tmp_path / "x.jsonl")])
    with pytest.raises(UserError, match="is a folder"):
        JsonlSource([str(tmp_path)])
