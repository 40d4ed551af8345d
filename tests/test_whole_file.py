"""Files that are there whole or not at all, whoever else writes them."""

from __future__ import annotations

import os
import threading

import pytest

from megatron_paradyse.data.writer import DatasetWriter
from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import (
    append_whole,
    check_figure,
    check_output,
    check_replaced,
    whole_file,
    write_whole,
)
from tests.full_disk import largest_file


def test_two_that_write_one_file_at_once_do_not_meet(tmp_path, monkeypatch):
    """As on two machines with one home, whose containers give both the same process id."""
    monkeypatch.setattr(os, "getpid", lambda: 17)
    path = tmp_path / "costs.json"
    with whole_file(path) as first:
        with open(first, "x") as stream:
            stream.write("first")
        write_whole(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["costs.json"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    """A crash of the machine in between would else leave an empty file, or the old one."""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda x: (done.append(os.readlink(f"/proc/self/fd/{x}")), fsync(x))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("named"), replace(*names)))
    opened = os.listdir("/proc/self/fd")
    write_whole(tmp_path / "x.json", "text")
    assert done[0].endswith(".tmp.json") and done[1:] == ["named", str(tmp_path)]
    assert len(os.listdir("/proc/self/fd")) == len(opened), "one is open still"


def test_a_name_alone_is_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_whole("x.json", "text")
    assert (tmp_path / "x.json").read_text() == "text"


def test_two_that_prepare_one_data_set_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 17)
    first, second = (DatasetWriter(str(tmp_path / "x"), 256) for _ in range(2))
    assert not {*first._temporary.values()} & {*second._temporary.values()}


def test_what_failed_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="no"), whole_file(path) as temporary:
        assert os.path.dirname(temporary) == str(tmp_path) and temporary.endswith(".tmp.json")
        with open(temporary, "x") as stream:
            stream.write("half")
        raise ValueError("no")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["x.json"]


def test_a_link_stays_and_the_file_that_it_names_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there/old.json", "there/new.json"):
        link = tmp_path / os.path.basename(name)
        link.symlink_to(name)
    (tmp_path / "there" / "old.json").write_text("before")
    for name in ("old.json", "new.json"):
        write_whole(tmp_path / name, "after")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / name).read_text() == "after"
    assert len(os.listdir(tmp_path)) == 3 and len(os.listdir(tmp_path / "there")) == 2


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "loop", "link to nowhere"])
def test_what_is_no_file_stays_what_it_is(kind, tmp_path):
    """As /dev/stdout, and in a container /dev/null, which a rename would replace."""
    path = tmp_path / "x.json"
    os.mkfifo(tmp_path / "pipe")
    if kind == "pipe":
        path = tmp_path / "pipe"
    else:
        to = {"link to a pipe": "pipe", "loop": "x.json", "link to nowhere": "nowhere/x.json"}
        path.symlink_to(to[kind])
    before = os.lstat(path)
    with pytest.raises(UserError, match=r"give the name of a file|there is no folder"):
        write_whole(path, "text")
    after = os.lstat(path)
    names = ("st_ino", "st_mode", "st_mtime_ns", "st_ctime_ns")  # a link that is read is accessed
    assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]
    assert set(os.listdir(tmp_path)) <= {"pipe", "x.json"}


def test_what_a_full_disk_has_no_room_for_leaves_no_part_of_a_line(tmp_path):
    """The next line would be one with it, which nothing reads."""
    path = tmp_path / "x.jsonl"
    append_whole(path, b"before\n")
    with largest_file(10), pytest.raises(OSError, match="No space left"):
        append_whole(path, b"a longer line\n")
    append_whole(path, b"after\n")
    assert path.read_text() == "before\nafter\n"


def test_a_pipe_that_is_read_takes_lines(tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    kept = os.open(path, os.O_RDWR)  # so that there is a reader, and no end between lines

    def read():
        with path.open("rb") as stream:
            found.extend(stream)

    reader = threading.Thread(target=read)
    reader.start()
    long = bytes(1 << 20) + b"\n"  # which the pipe takes as fast as it is read
    append_whole(path, b"first\n")
    append_whole(path, long)
    with path.open("wb"):
        os.close(kept)
    reader.join(timeout=60)
    assert found == [b"first\n", long]


def test_what_cannot_be_written_is_told_before_long_work(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other.svg"
    folder.mkdir()
    other.write_text("another's")
    for name in (folder, f"{folder}/", f"{tmp_path}/none/"):
        with pytest.raises(UserError, match="is a folder: give the name of a file in it"):
            check_output(name)
    for check in (check_output, check_figure, lambda name: check_replaced(name, "it", ("a",))):
        with pytest.raises(UserError, match=f"there is no folder {tmp_path}/none: make it"):
            check(f"{tmp_path}/none/x.svg")
    for name in ("x.svg", "x.PNG", "x.y.pdf", "other.svg"):
        check_figure(str(tmp_path / name))
    with pytest.raises(UserError, match=r"a figure ends in \.png, \.svg or \.pdf, got x\.jpg"):
        check_figure("x.jpg")


def test_a_file_of_another_kind_is_not_replaced(tmp_path):
    path = tmp_path / "x.json"
    check_replaced(path, "a thing", ("one", "two"))  # there is none yet
    for text, marks in (("", ("one",)), ("two and one", ("one", "two"))):
        path.write_text(text)
        check_replaced(path, "a thing", marks)
    for text in ("one alone", " " * 8192 + "one two"):
        path.write_text(text)
        with pytest.raises(UserError, match="is another file, not a thing: give the name of a new"):
            check_replaced(path, "a thing", ("one", "two"))
