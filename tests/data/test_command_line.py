"""The command line: quick help without torch, one-line errors, exit codes, JSON, no debris."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import COMMANDS, RootGroup, cli
from megatron_paradyse.data.commands import data
from megatron_paradyse.data.prepare_inputs import check_kept, kind_of
from megatron_paradyse.errors import UserError


def run(*arguments: object):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def lines(result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line]


def test_help_imports_neither_torch_nor_the_numeric_libraries():
    script = """
import sys
from click.testing import CliRunner
from megatron_paradyse.cli import cli
for arguments in (["--help"], ["data", "--help"], ["data", "prepare", "--help"]):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0 and "Usage:" in result.output, result.output
heavy = {"torch", "numpy", "megatron", "rich", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    command = [sys.executable, "-X", "importtime", "-m", "megatron_paradyse", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names = {line.rpartition("|")[2].strip().split(".")[0] for line in run.stderr.splitlines()}
    assert "click" in names and "data" in run.stdout
    assert not names & {"torch", "numpy", "megatron", "rich", "matplotlib"}


def test_every_command_is_found_and_says_what_it_does():
    for name in COMMANDS:
        assert run(name, "--help").exit_code == 0
    for name, command in data.commands.items():
        output = run("data", name, "--help").output
        assert "Example" in output, name
        assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_version():
    assert run("--version").output.startswith("megatron-paradyse, version 0.")


@pytest.fixture
def failing():
    """A command line whose one command raises what it is told to."""
    errors = {
        "user": UserError("a rule,\nthe value"),
        "system": PermissionError(13, "Permission denied", "/x\x1b[31m"),
        "bug": RuntimeError("unexpected"),
        "interrupt": KeyboardInterrupt(),
    }

    @click.command()
    @click.argument("kind")
    def fail(kind):
        raise errors[kind]

    group = RootGroup("root", lazy={}, params=cli.params)
    group.add_command(fail)
    return lambda *arguments: CliRunner().invoke(group, arguments)


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        ("user", 1, "error: a rule, the value"),
        ("system", 1, "error: /x\\x1b[31m: Permission denied"),
        ("bug", 1, "error: internal error, RuntimeError: unexpected (megatron-paradyse --debug"),
        ("interrupt", 130, "error: interrupted"),
    ],
)
def test_every_failure_is_one_line_and_a_code(failing, kind, code, line):
    result = failing("fail", kind)
    assert result.exit_code == code
    assert len(lines(result)) == 1 and lines(result)[0].startswith(line)
    debug = failing("--debug", "fail", kind)
    assert debug.exit_code == code and "Traceback" in debug.stderr
    assert lines(debug)[-1].startswith(line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["data", "prepare"], "Missing argument"),
        (["data", "prepare", "x"], "Missing option '-o' / '--output-prefix'"),
        (["data", "prepare", "x", "-o", "y", "--tokenizer", "z"], "'z' is not one of"),
        (["data", "prepare", "x", "-o", "y", "--max-documents", "many"], "got 'many'"),
        (["data", "lengths", "x", "--scale", "0"], "got '0'"),
        (["data", "lengths", "x", "--unknown"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line_with_the_way_to_help_and_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(lines(result)) == 1 and message in lines(result)[0]
    assert "--help)" in lines(result)[0]


def test_wrong_input_is_one_line_and_code_1(tmp_path):
    (tmp_path / "x.fa").write_text(">a\nACGE\n")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "x.bed").write_text("a")
    prefix = tmp_path / "out" / "x"
    cases = {
        ("prepare", tmp_path / "none", "-o", prefix): "none does not exist",
        ("prepare", tmp_path / "x.fa", "-o", prefix): "x.fa:2: the letter 'E' is no nucleotide",
        ("prepare", tmp_path / "x.jsonl", "-o", prefix): "x.jsonl:2: no key 'text' (keys: body)",
        ("prepare", tmp_path / "x.bed", "-o", prefix): "unknown kind of file: give --source",
        ("prepare", tmp_path, tmp_path / "x.fa", "-o", prefix): "prepare each kind alone",
        ("prepare", tmp_path, "-o", prefix): "no file ends in .py",
        ("prepare", tmp_path / "x.fa", "-o", prefix, "--kmer", 0): "got k=0",
        ("prepare", tmp_path / "x.fa", "-o", prefix, "--vocab-file", "v"): "reads no files",
        ("prepare", tmp_path / "x.fa", "-o", tmp_path / "x.fa" / "y"): "x.fa is not a folder",
        ("lengths", prefix): "x.idx does not exist",
        ("synthesize", "--distribution", "grch38", "--documents", 0, "-o", prefix): "--documents 0",
    }
    for arguments, message in cases.items():
        result = run("data", *arguments)
        assert result.exit_code == 1, arguments
        assert len(lines(result)) == 1, lines(result)
        assert message in lines(result)[0]
        assert not prefix.parent.exists() or not list(prefix.parent.iterdir())


def test_prepare_lengths_and_figure_end_to_end(tmp_path):
    (tmp_path / "code").mkdir()
    for i in range(4):
        (tmp_path / "code" / f"{i}.py").write_text("x" * 3000 * i)
    result = run("data", "prepare", tmp_path / "code", "-o", tmp_path / "p", "--json")
    values = json.loads(result.stdout)
    assert (values["num_documents"], values["num_empty_documents"]) == (3, 1)
    assert run("data", "prepare", tmp_path / "code", "-o", tmp_path / "p").exit_code == 1
    result = run("data", "prepare", tmp_path / "code", "-o", tmp_path / "p", "--overwrite")
    assert "3 documents, 18,003 tokens, longest 9,001; left out 1 empty" in result.stdout

    result = run("data", "lengths", tmp_path / "p", "--plot", tmp_path / "p.png")
    assert "3 sequences, 18,003 tokens" in result.stdout and "65.7%" in result.stdout
    assert (tmp_path / "p.png").stat().st_size > 10_000
    values = json.loads(run("data", "lengths", tmp_path / "p.idx", "--json").stdout)
    assert values["bucket_sequences"] == [1, 1, 1, 0, 0, 0, 0]
    assert values["published"]["GRCh38"]["percent_of_sequences"][0] == 3.5


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_file_that_is_read_is_never_replaced(overwrite, tmp_path):
    """PREFIX.json is ours, and docs.json the name of many a file of documents."""
    docs, link = tmp_path / "docs.json", tmp_path / "link.json"
    docs.write_text('{"text": "a"}\n')
    link.symlink_to(docs)
    for name in ("docs", "link"):
        result = run("data", "prepare", docs, "-o", tmp_path / name, *overwrite)
        assert result.exit_code == 1 and "docs.json is read, and --output-prefix" in result.stderr
    files = [
        "--tokenizer",
        "GPT2BPETokenizer",
        "--vocab-file",
        docs,
        "--merge-file",
        tmp_path / "m",
    ]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    result = run("data", "prepare", tmp_path / "a.jsonl", *files, "-o", docs.with_suffix(""))
    assert "docs.json is read, and --output-prefix" in result.stderr
    assert docs.read_text() == '{"text": "a"}\n' and not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("option", ["tokenizer_model", "vocab_file", "merge_file", "chat_template"])
def test_no_file_of_a_tokenizer_is_replaced(option, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.touch()
    options = dict.fromkeys(("tokenizer_model", "vocab_file", "merge_file", "chat_template"))
    check_kept(("a.jsonl",), options, str(tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=r"tokenizer\.json is read, and --output-prefix"):
        check_kept(("a.jsonl",), {**options, option: str(path)}, str(tmp_path / "tokenizer"))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("jsonl", "a.jsonl a.json a.ndjson A.JSON.gz a.jsonl.GZ"),
        ("fasta", "a.fa a.fasta a.fna a.ffn a.frn A.Fa.gz"),
    ],
)
def test_kinds_of_files_are_told_by_their_names_in_either_case(kind, names):
    assert {name: kind_of((name,), "auto") for name in names.split()} == dict.fromkeys(
        names.split(), kind
    )


def test_what_an_earlier_run_wrote_into_a_tree_is_no_document_of_the_next(tmp_path):
    """all.json would be the last but one document, 521 tokens about the data set itself."""
    tree, prefix = tmp_path / "tree", tmp_path / "tree" / "all"
    tree.mkdir()
    (tree / "node_modules").mkdir()
    for name in ("a", "b", "node_modules/c"):
        (tree / f"{name}.json").write_text('{"x": 1}')
    command = ("data", "prepare", tree, "--suffix", ".json", "-o", prefix)
    assert "2 documents, 18 tokens" in run(*command).stdout
    for overwrite in ([], ["--overwrite"]):
        result = run(*command, *overwrite)
        assert result.exit_code == 1
        assert f"{prefix}.json is read, and --output-prefix" in result.stderr
        assert result.stderr.endswith("leave it out with --exclude all.json\n")
    result = run(*command, "--overwrite", "--exclude", "all.json")
    assert "2 documents, 18 tokens" in result.stdout


def test_what_is_being_written_into_a_tree_is_no_document_of_it(tmp_path, monkeypatch):
    """It would grow by each byte that is read of it."""
    monkeypatch.setattr("megatron_paradyse.data.writer.MAX_DOCUMENT_TOKENS", 1 << 22)
    tree = tmp_path / "tree"
    (tree / "out").mkdir(parents=True)
    (tree / "a.bin").write_bytes(b"a" * (2 << 20))  # more than is buffered
    (tree / "out" / f".x.host.{'a1' * 8}.tmp.bin").write_bytes(b"left behind by kill -9")
    result = run("data", "prepare", tree, "--suffix", ".bin", "-o", tree / "out" / "x")
    assert result.exit_code == 0, result.stderr
    assert "1 document, 2,097,153 tokens" in result.stdout


def test_another_file_of_the_name_of_metadata_stays_and_is_not_asked(tmp_path):
    """tokenizer.json of a folder that is read was replaced; a figure wanted our keys in it."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    other = tmp_path / "tokenizer.json"
    other.write_text('{"version": "1.0", "model": {}}')
    prepare = ("data", "prepare", tmp_path / "a.jsonl", "-o", tmp_path / "tokenizer")
    result = run(*prepare, "--overwrite")
    assert result.exit_code == 1
    said = f"error: {other} is another file, not the metadata of a data set: give the name of a new"
    assert result.stderr.startswith(said)
    assert other.read_text() == '{"version": "1.0", "model": {}}'
    other.write_text("")
    assert run(*prepare, "--overwrite").exit_code == 0
    other.write_text('{"version": "1.0", "model": {}}')
    result = run("data", "lengths", tmp_path / "tokenizer", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.stderr
    assert "tokenizer: measured" in (tmp_path / "a.svg").read_text()
    other.write_text('{"tokenizer": "bytes", "tokenizer_parameters": {}}')
    result = run("data", "lengths", tmp_path / "tokenizer", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 1 and "schema_version must be 1" in result.stderr


@pytest.mark.parametrize("name", ["no \udcff text", "$\\foo$"])
def test_a_figure_has_whatever_name_a_data_set_has(name, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert run("data", "prepare", tmp_path / "a.jsonl", "-o", tmp_path / name).exit_code == 0
    result = run("data", "lengths", tmp_path / name, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output


def test_fasta_and_jsonl_find_their_tokenizer(tmp_path):
    (tmp_path / "x.fna").write_text(">a\nACGTACGT\n>b\nNNN\n")
    run("data", "prepare", tmp_path / "x.fna", "-o", tmp_path / "dna", "--split-bases", 6)
    values = json.loads((tmp_path / "dna.json").read_text())
    assert (values["tokenizer"], values["dtype"], values["num_documents"]) == ("kmer", "uint8", 3)
    assert values["source_parameters"] == {"split_bases": 6}
    (tmp_path / "x.jsonl").write_text('{"body": "text"}\n')
    run("data", "prepare", tmp_path / "x.jsonl", "--key", "body", "-o", tmp_path / "text")
    assert json.loads((tmp_path / "text.json").read_text())["tokenizer"] == "bytes"


def test_synthesize_prints_what_it_wrote(tmp_path):
    arguments = ["--distribution", "githubcode", "--documents", "1K", "--scale", "1/256"]
    result = run("data", "synthesize", *arguments, "-o", tmp_path / "s")
    assert "1,024 documents" in result.stdout
    result = run("data", "lengths", tmp_path / "s", "--scale", "1/256")
    assert "edges x 0.00390625" in result.stdout


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_in_one_line_and_leaves_nothing(tmp_path, signum, code):
    """The FASTA has 200 million bases, so that prepare is surely at work when it is hit."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    with open(tmp_path / "in" / "x.fa", "wb") as stream:
        stream.write(b">a\n")
        for _ in range(200):
            stream.write(b"ACGT" * 250_000 + b"\n")
    prefix = tmp_path / "out" / "x"
    command = [sys.executable, "-m", "megatron_paradyse", "data", "prepare"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "in" / "x.fa"), "-o", str(prefix)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not os.listdir(tmp_path / "out") and time.monotonic() < deadline:
        time.sleep(0.01)
    (temporary,) = os.listdir(tmp_path / "out")
    assert re.fullmatch(rf"\.x\.{re.escape(socket.gethostname())}\.\w+\.tmp\.bin", temporary)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stderr.splitlines()[-1] in ("error: interrupted", "error: terminated")
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path / "out") == []
