"""The data sets of a run, whichever of Megatron's flags name them, and their vocabulary."""

from __future__ import annotations

import argparse
import json
import re
import sys

import pytest

from megatron_paradyse.data.megatron_tokenizers import vocabulary_digest
from megatron_paradyse.data.metadata import DatasetMetadata
from megatron_paradyse.errors import UserError
from megatron_paradyse.train import agreement, plugin
from megatron_paradyse.train.data_files import check_fixed_splits, check_split, other_vocabulary
from tests.train.harness import MODEL, write_documents
from tests.train.parsing import validated

FLAGS = {
    "--data-path": "A B",
    "--data-args-path": "args.txt",
    "--train-data-path": "A --valid-data-path B",
    "--per-split-data-args-path": "splits.json",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Data sets A and B of 257 ids, and the files that name them."""
    for name in "AB":
        write_documents(tmp_path / name, [20] * 10)
        write_metadata(tmp_path / name)
    write_documents(tmp_path / "none", [0])
    (tmp_path / "args.txt").write_text("1 A\n2 B\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": "A", "valid": ["B"], "test": "B"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_metadata(prefix, vocab_size=257, tokenizer="bytes", **parameters):
    counts = dict.fromkeys(
        ("num_documents", "num_tokens", "max_document_tokens", "num_empty_documents"), 20
    )
    metadata = DatasetMetadata(
        tokenizer=tokenizer,
        tokenizer_parameters=parameters,
        vocab_size=vocab_size,
        eod=vocab_size - 1,
        append_eod=True,
        dtype="uint16",
        source="jsonl",
        source_parameters={},
        **counts,
    )
    prefix.with_suffix(".json").write_text(metadata.to_json())


def arguments_of(monkeypatch, *flags):
    """Megatron's arguments for documents, validated, without a tokenizer."""
    plugin.install()
    from megatron.training.arguments import parse_args

    without = ("--tokenizer-type", "--vocab-size")
    given = [text for k, v in MODEL.items() if k not in without for text in (k, str(v))]
    given += ["--paradyse", "--paradyse-policy", "fixed:megatron_ts", *flags]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *given])
    return validated(parse_args())


@pytest.mark.parametrize("flag", FLAGS)
def test_every_way_to_name_data_gives_vocabulary_and_digests(flag, folder, monkeypatch):
    args = arguments_of(monkeypatch, flag, *FLAGS[flag].split())
    assert (args.tokenizer_type, args.vocab_size) == ("NullTokenizer", 257)
    digests = {k: v for k, v in agreement.values_of(args).items() if k.startswith("data set")}
    assert len(digests) == 4 and all("bytes" in digest for digest in digests.values())
    (folder / "B.bin").write_bytes(b"other data")
    changed = agreement.values_of(args)
    assert [k for k, v in digests.items() if changed[k] != v] == ["data set 2 (.bin)"]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_data_set_that_is_not_there_is_named(flag, folder, monkeypatch):
    (folder / "B.idx").unlink()
    with pytest.raises(UserError, match=r"data file B\.idx not found: "):
        arguments_of(monkeypatch, flag, *FLAGS[flag].split())


@pytest.mark.parametrize(
    "flags", ["--data-args-path none.txt", "--data-args-path args.txt --data-path A", "--data-path"]
)
def test_flags_that_name_no_data_set_are_one_line(flags, folder, monkeypatch):
    with pytest.raises(UserError, match=r"^--data-.*cannot be read as data sets \("):
        arguments_of(monkeypatch, *flags.split())


def test_a_rank_that_cannot_read_its_flags_tells_the_others(folder, monkeypatch):
    """It left before they had a word of it, and they waited."""
    fixed = ["--paradyse-sequences", "fixed", "--tokenizer-type", "NullTokenizer"]
    fixed += ["--vocab-size", "257", "--data-args-path", "args.txt"]
    args = arguments_of(monkeypatch, *fixed)
    (folder / "args.txt").unlink()
    told = agreement.values_of(args)["the data sets"]
    assert "--data-args-path cannot be read as data sets (FileNotFoundError" in told


def test_data_sets_of_other_vocabularies_are_refused(folder, monkeypatch):
    """Each token would be learnt as another one, without a sign."""
    write_metadata(folder / "B", 300)
    with pytest.raises(UserError, match=r"A has .* of bytes with 257 ids, .* and B of "):
        arguments_of(monkeypatch, "--data-path", "A", "B")
    given = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    assert arguments_of(monkeypatch, "--data-path", "A", "B", *given).vocab_size == 300


HUGGING = "HuggingFaceTokenizer"


@pytest.mark.parametrize("first", ["0f", None])
def test_data_sets_whose_ids_stand_for_other_tokens_are_refused(first, folder, monkeypatch):
    """Of one tokenizer's name, size and end; older data sets tell of no more."""
    names = ("A", "A", "B") if first is None else ("A", "B")
    given = ["--data-path", *names]
    for name, digest in (("A", first), ("B", "1e")):
        write_metadata(folder / name, 257, HUGGING, **({"vocabulary": digest} if digest else {}))
    if first is None:
        assert arguments_of(monkeypatch, *given).vocab_size == 257
        write_documents(folder / "C", [20] * 10)
        write_metadata(folder / "C", 257, HUGGING, vocabulary="0f")
        given.append("C")
    with pytest.raises(UserError, match=r"has .* of HuggingFaceTokenizer .* digest .* and . of "):
        arguments_of(monkeypatch, *given)


@pytest.mark.parametrize(
    ("made_by", "its", "told"),
    [
        (HUGGING, {"vocabulary": "same", "model": "here/"}, None),
        (HUGGING, {"vocabulary": "other", "model": "there/"}, f"A was .* {HUGGING} there/, whose"),
        (HUGGING, {"model": "there/"}, None),  # older data do not know
        ("bytes", {}, "A was prepared with bytes, whose ids stand for other tokens than .* leave"),
    ],
)
def test_data_of_another_tokenizer_than_the_runs_are_told(made_by, its, told, folder, monkeypatch):
    tokenizer = argparse.Namespace(inv_vocab={0: "a", 1: "b", 2: "added in training"})
    if its.get("vocabulary") == "same":
        its = its | {"vocabulary": vocabulary_digest(tokenizer, 2)}
    write_metadata(folder / "A", 2, made_by, **its)
    (folder / "B.json").write_text("of another program")
    args = arguments_of(monkeypatch, "--data-path", "A", "B", "--vocab-size", "2")
    args.tokenizer_type = HUGGING
    news = other_vocabulary(args, tokenizer)
    assert news is None if told is None else re.match(told, news)
    assert other_vocabulary(args, argparse.Namespace()) is None  # a tokenizer that cannot tell
    args.tokenizer_type = "NullTokenizer"
    assert other_vocabulary(args, tokenizer) is None


@pytest.mark.parametrize("weights", ["-1 2", "nan 1", "inf 1", "0 0"])
def test_weights_that_are_no_shares_are_refused(weights, folder, monkeypatch):
    first, second = weights.split()
    with pytest.raises(UserError, match=r"^--data-path with the weights .*: give numbers of 0 or"):
        arguments_of(monkeypatch, "--data-path", first, "A", second, "B")


@pytest.mark.parametrize("split", ["969, 30, 1", "969 30 1", "[99,1,0]", "0.9/0.1", "100", None])
def test_a_split_is_taken_in_every_spelling_that_megatron_takes(split):
    check_split(split)


@pytest.mark.parametrize("split", ["", "0,0", "9,-1", "1e-3,1", "1.2.3,1", "1,1,1,1", "all"])
def test_a_split_that_megatron_misreads_is_refused(split):
    with pytest.raises(UserError, match="give the shares of training, validation and test"):
        check_split(split)


@pytest.mark.parametrize(
    ("flags", "empty"),
    [
        (["--data-path", "A"], "validation split none of the 10 documents of A: .* --eval-iters 0"),
        (["--data-path", "1", "A", "1", "B", "--split", "1,99,0"], "training split .* of A: "),
        (["--data-args-path", "args.txt", "--split", "50,49,1", "--eval-iters", "1"], "test split"),
        (["--data-path", "A", "--split", "0,100,0"], "training split .* of A: "),
        (
            ["--train-data-path", "A", "--valid-data-path", "none"],
            "validation split none of the 1 ",
        ),
        (["--data-path", "A", "--split", "0,0,100", "--skip-train"], None),
        (["--data-path", "A", "--split", "100,0,0"], None),
        (["--data-path", "A", "B", "--split", "80,10,10", "--eval-iters", "1"], None),
        (["--train-data-path", "A", "--valid-data-path", "B"], None),
        (["--mock-data"], None),
    ],
)
def test_a_split_of_megatrons_own_data_without_a_token_is_refused(
    flags, empty, folder, monkeypatch
):
    """Its index builder would count epochs of it without end, on every rank, in silence."""
    fixed = ["--paradyse-sequences", "fixed", "--tokenizer-type", "NullTokenizer"]
    args = arguments_of(monkeypatch, *fixed, "--vocab-size", "257", *flags)
    if empty is None:
        check_fixed_splits(args)
        return
    with pytest.raises(UserError, match=f"^--(split|train-data-path).* leaves the {empty}"):
        check_fixed_splits(args)


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        (["--data-path", "A", "--split", "80,10,10"], "--split 80,10,10: .* of the validation"),
        (["--data-path", "A", "--split", "60,40,0"], None),  # 80 tokens are a sample of 65
        (["--data-path", "A", "B", "--split", "60,40,0"], "--split 60,40,0: .* of the validation"),
        (["--data-path", "1", "A", "1", "B", "--split", "60,0,40"], "--split .* of the test split"),
        (["--train-data-path", "A", "--valid-data-path", "A", "B"], "--train-data-path: .* valid"),
    ],
)
def test_without_evaluations_data_that_megatron_makes_no_sample_of_are_refused(
    flags, split, folder, monkeypatch
):
    """It asks for none, and ends where an epoch has none, or for a blend of data sets."""
    fixed = ["--paradyse-sequences", "fixed", "--tokenizer-type", "NullTokenizer"]
    args = arguments_of(monkeypatch, *fixed, "--vocab-size", "257", *flags)
    if split is not None:
        with pytest.raises(UserError, match=f"^--eval-iters 0 with {split}"):
            check_fixed_splits(args)
        args.eval_iters = 1
    check_fixed_splits(args)
