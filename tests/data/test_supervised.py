"""Prompts and conversations: which of their tokens are learnt."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.metadata import read_metadata
from megatron_paradyse.errors import UserError
from tests.data.chats import (
    END,
    FORGETFUL,
    MARKED,
    MARKED_CONTENT,
    MARKED_STEP,
    OPEN,
    PLAIN,
    STEP,
    STEPS,
    STOP,
    chat,
    small_bpe,
)
from tests.data.preparing import prepare


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_bpe(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model_of_trimmed(tmp_path_factory):
    """As GPT-2's: offsets of a token leave out its spaces, and so all of one of spaces."""
    return small_bpe(tmp_path_factory.mktemp("trimmed"), trim_offsets=True)


@pytest.fixture(scope="module")
def library(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def documents(prefix) -> list[tuple[list[int], list[int]]]:
    """Of each document its tokens and those that are learnt, read without this package."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    marks, stop, read = np.fromfile(f"{prefix}.targets", dtype=np.uint8), 0, []
    for tokens in IndexedDataset(str(prefix)):
        start, stop = stop, stop + len(tokens)
        read.append((tokens.tolist(), tokens[marks[start:stop] == 1].tolist()))
    assert stop == len(marks) and set(marks.tolist()) <= {0, 1}
    return read


def test_of_a_prompt_and_a_completion_the_completion_and_its_end_are_learnt(tmp_path):
    records = [{"q": "What? ", "a": "This."}, {"q": "", "a": "Free."}, {"q": "None", "a": ""}]
    prefix, result = prepare(tmp_path, records, "--prompt-key", "q", "--key", "a")
    assert result.exit_code == 0, result.stderr
    assert documents(prefix) == [
        ([*b"What? This.", 256], [*b"This.", 256]),
        ([*b"Free.", 256], [*b"Free.", 256]),
    ]
    metadata = read_metadata(prefix)
    assert (metadata.num_target_tokens, metadata.num_empty_documents) == (12, 1)
    assert metadata.source == "prompts"
    assert metadata.source_parameters == {"prompt_key": "q", "key": "a"}
    assert (
        "12 tokens are learnt, 66.7%" in result.stdout and ".idx, .targets, .json" in result.stdout
    )


@pytest.mark.parametrize("prompt, completion", [("def f", "oo():"), ("a ", "b"), ("hä", "ß\n")])
def test_a_prompt_is_tokenized_as_one_text_with_its_completion(
    prompt, completion, model, library, tmp_path
):
    tokenizer = ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", model]
    record = {"prompt": prompt, "completion": completion}
    prefix, result = prepare(tmp_path, [record], "--prompt-key", "prompt", *tokenizer)
    assert result.exit_code == 0, result.stderr
    ((tokens, learnt),) = documents(prefix)
    assert tokens == [*library(prompt + completion).input_ids, library.eos_token_id]
    # A token that reaches into the completion is learnt, no other one of the prompt.
    offsets = library(prompt + completion, return_offsets_mapping=True).offset_mapping
    assert len(learnt) == 1 + sum(stop > len(prompt) for _, stop in offsets)


TEXTS = st.text(st.sampled_from("ab \nä🙂:"), max_size=12)


@settings(max_examples=60)
@given(turns=st.lists(TEXTS, min_size=2, max_size=7))
def test_spans_of_turns_are_those_that_a_template_marks(turns, model):
    """The library's own masks of the same template with marks are the oracle."""
    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer
    from megatron_paradyse.data.supervised import Conversation

    plain = TemplateTokenizer(model=str(model), chat_template=PLAIN)
    marked = TemplateTokenizer(model=str(model), chat_template=MARKED)
    conversation = Conversation(chat(*turns), None)
    for learn in ("assistant", "each"):  # where all is written alike, each is in one document
        (mine,), (theirs,) = (t.documents(conversation, learn=learn) for t in (plain, marked))
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.learnt.tolist() == theirs.learnt.tolist()


def learnt_texts(model, template, messages, learn="assistant"):
    """The runs of tokens that are learnt, as texts."""
    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer
    from megatron_paradyse.data.supervised import Conversation

    tokenizer = TemplateTokenizer(model=str(model), chat_template=template)
    ((tokens, learnt),) = tokenizer.documents(Conversation(messages, None), learn=learn)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], learnt, [0]])))
    return [tokenizer._library.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    "template, end", [(PLAIN, f"{END}\n"), (MARKED, f"{END}\n"), (MARKED_CONTENT, "")]
)
def test_spaces_are_learnt_where_offsets_of_tokens_leave_them_out(template, end, model_of_trimmed):
    turns = ["  x ", " indent:\n        y  z   "]
    turns_between = chat("a   ", turns[0], "  b", turns[1])
    assert learnt_texts(model_of_trimmed, template, turns_between) == [t + end for t in turns]


def test_single_turns_of_a_template_that_marks_are_as_it_marks_them(model):
    turns = chat("One?", "1", "Two?", "2", "Three?", "3")
    assert learnt_texts(model, MARKED_CONTENT, turns, learn="last") == ["3"]
    turns[1]["weight"] = 0
    assert learnt_texts(model, MARKED_CONTENT, turns) == ["2", "3"]
    one_more = "{% generation %}x{% endgeneration %}" + MARKED_CONTENT
    with pytest.raises(UserError, match=r"marks 4 parts with .* of 3 turns of the assistant"):
        learnt_texts(model, one_more, turns)


def test_a_token_around_an_empty_mark_is_not_learnt(model):
    """Where the spaces on both sides of it are one token."""
    around = "{% for m in messages %}x:    {% generation %}{{ m.content }}{% endgeneration %}    y"
    assert learnt_texts(model, around + "{% endfor %}", chat("", "")) == []


def test_an_id_beyond_the_vocabulary_is_refused(model):
    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer
    from megatron_paradyse.data.supervised import Conversation

    tokenizer = TemplateTokenizer(model=str(model), chat_template=PLAIN)
    tokenizer.vocab_size = 256  # of which .bin would hold a byte each
    with pytest.raises(UserError, match=r"gave the id \d+ beyond its vocabulary of 256"):
        list(tokenizer.documents(Conversation(chat("def f", "return"), None), learn="all"))


def test_a_template_alone_says_what_begins_a_conversation(model):
    """Not the tokenizer, which would write a second one of what the template has written."""
    from tokenizers.processors import TemplateProcessing

    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer
    from megatron_paradyse.data.supervised import Conversation

    tokenizer = TemplateTokenizer(model=str(model), chat_template=STOP + PLAIN)
    library, conversation = tokenizer._library, Conversation(chat("a", "b"), None)
    begins = TemplateProcessing(single=f"{STOP} $A", special_tokens=[(STOP, library.eos_token_id)])
    library.backend_tokenizer.post_processor = begins
    assert library("a").input_ids[0] == library.eos_token_id
    ((tokens, _),) = tokenizer.documents(conversation, learn="all")
    assert tokens.tolist().count(library.eos_token_id) == 1


def test_templates_are_told_apart(model):
    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer

    digests = [
        TemplateTokenizer(model=str(model), chat_template=template).parameters()["chat_template"]
        for template in (None, PLAIN, MARKED)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_the_end_of_a_turn_that_is_written_once_more_follows_is_learnt(model):
    assert learnt_texts(model, OPEN, chat("a", "b", "c", "d")) == [f"b{STOP}", "d"]


def test_half_a_character_is_replaced(model):
    for template in (PLAIN, MARKED):
        assert learnt_texts(model, template, chat("\ud83d", "x \ud83d")) == [f"x \ufffd{END}\n"]


def test_keys_of_null_count_as_missing_and_lists_of_texts_as_texts(model, library, tmp_path):
    """As data sets export records of which others have those keys."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = chat(parts, "Hi")
    messages = [{**message, "weight": None, "tool_calls": None} for message in messages]
    options = ["--source", "chat", "--tokenizer-model", model]
    prefix, result = prepare(tmp_path, [{"messages": messages, "tools": None}], *options)
    assert result.exit_code == 0, result.stderr
    ((tokens, learnt),) = documents(prefix)
    assert library.decode(tokens) == library.apply_chat_template(
        chat("Hello", "Hi"), tokenize=False
    )
    assert library.decode(learnt) == f"Hi{END}\n"


def test_what_is_learnt_of_a_conversation_can_be_chosen(model, library, tmp_path):
    """The assistant's turns, the last one, all; a weight of 0 leaves a turn out."""
    turns = chat("One?", "1", "Two?", "2", "Three?", "3")
    turns[1]["weight"] = 0
    text = library.apply_chat_template(turns, tokenize=False)
    for options, expected in (
        ([], f"2{END}\n3{END}\n"),
        (["--learn", "last"], f"3{END}\n"),
        (["--learn", "all", "--append-eod"], None),
    ):
        chosen = ["--source", "chat", "--tokenizer-model", model, *options, "--overwrite"]
        prefix, result = prepare(tmp_path, [{"messages": turns}], *chosen)
        assert result.exit_code == 0, result.stderr
        if expected is None:
            assert not os.path.exists(f"{prefix}.targets"), "that of the data set before"
            assert read_metadata(prefix).num_target_tokens is None
            continue
        ((tokens, learnt),) = documents(prefix)
        assert library.decode(tokens) == text and library.decode(learnt) == expected


def test_a_system_message_begins_another_conversation(model, library, tmp_path):
    """As in Megatron's SFTDataset; one without an answer has nothing to learn."""
    system = {"role": "system", "content": "Brief."}
    messages = [*chat("a", "b"), system, *chat("c", "d"), system, *chat("e")]
    options = ["--source", "chat", "--tokenizer-model", model]
    prefix, result = prepare(
        tmp_path, [{"messages": messages}, {"messages": messages[2:]}], *options
    )
    assert result.exit_code == 0 and "left out 2 empty" in result.stdout
    parts = (messages[:2], messages[2:5], messages[2:5])
    expected = [library.apply_chat_template(part)["input_ids"] for part in parts]
    assert [tokens for tokens, _ in documents(prefix)] == expected
    parameters = read_metadata(prefix).source_parameters
    assert parameters == {"key": "messages", "learn": "assistant"}


@pytest.mark.parametrize("name", ["nemotron-nano-v2", "identity", "default"])
def test_formats_of_megatrons_sft_give_its_tokens_and_targets(name, model, tmp_path):
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import IGNORE_INDEX, SFTTokenizer

    conversations = [chat("One? /think", "1", "Two?", "2 <unk>"), chat(" x", "y")]
    options = ["--source", "chat", "--tokenizer", "SFTTokenizer", "--tokenizer-model", model]
    options += ["--sft-tokenizer-prompt-format", name]
    prefix, result = prepare(tmp_path, [{"messages": turns} for turns in conversations], *options)
    assert result.exit_code == 0, result.stderr
    theirs = SFTTokenizer(str(model), name)
    for turns, (tokens, learnt) in zip(conversations, documents(prefix), strict=True):
        expected, targets = theirs.tokenize_conversation(
            turns, return_target=True, add_generation_prompt=False
        )
        assert tokens == expected.tolist()
        counted = (targets != IGNORE_INDEX) & (targets != theirs.pad_id)  # as SFTDataset's mask
        assert learnt == expected[counted].tolist()
    # Either tokenizer has the same ids, so that data of both may be blended.
    metadata = read_metadata(prefix)
    assert metadata.tokenizer == "HuggingFaceTokenizer"
    assert metadata.tokenizer_parameters["prompt_format"] == name
    asked = [{"messages": chat("only asked")}]
    prefix, result = prepare(tmp_path, asked, *options, "--learn", "all", "--overwrite")
    assert result.exit_code == 0 and read_metadata(prefix).num_documents == 1, result.stderr


def test_the_last_turn_can_be_learnt_where_a_template_forgets_reasoning(model, library, tmp_path):
    (tmp_path / "template").write_text(FORGETFUL)
    turns = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
    options = ["--source", "chat", "--tokenizer-model", model, "--learn", "last"]
    options += ["--chat-template", tmp_path / "template"]
    prefix, result = prepare(tmp_path, [{"messages": turns}], *options)
    assert result.exit_code == 0, result.stderr
    ((tokens, learnt),) = documents(prefix)
    assert "x" not in library.decode(tokens)
    assert library.decode(learnt) == f"<think>y</think>d{END}\n"


TURN = st.sampled_from(("user", "assistant", "tool"))
SKIPPED = st.sets(st.integers(0, 8), max_size=2)


@pytest.mark.parametrize("template", [STEPS, STEPS.replace("SAYS", MARKED_STEP)])
@settings(max_examples=40)
@given(roles=st.lists(TURN, max_size=8), skipped=SKIPPED)
def test_each_turn_is_learnt_once_as_it_is_written_when_it_is_the_last(
    template, roles, skipped, model, library
):
    """The oracle: the texts that a model is asked with, and what it then says."""
    from megatron_paradyse.data.chat_tokenizers import TemplateTokenizer
    from megatron_paradyse.data.supervised import Conversation

    template = template.replace("SAYS", STEP)
    messages = [
        {"role": role, "content": f"<think>why{i}</think>so{i}"}
        for i, role in enumerate(["user", *roles])
    ]
    for i in skipped & set(range(len(messages))):
        messages[i]["weight"] = 0
    expected = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and "weight" not in message:
            asked, told = (
                library.apply_chat_template(
                    part, chat_template=template, tokenize=False, add_generation_prompt=asks
                )
                for part, asks in ((messages[:i], True), (messages[: i + 1], False))
            )
            expected[i] = (asked, told.removeprefix(asked))
    tokenizer = TemplateTokenizer(model=str(model), chat_template=template)
    made = list(tokenizer.documents(Conversation(messages, None), learn="each"))
    found = []
    for tokens, learnt in made:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], learnt, [0]])))
        for start, stop in edges.reshape(-1, 2):
            found.append((library.decode(tokens[:start]), library.decode(tokens[start:stop])))
    assert sorted(found) == sorted(expected.values())
    # No document more than questions, of which each takes the reasoning of the turns before it.
    rounds = {roles[:i].count("user") for i in range(len(roles)) if i + 1 in expected}
    assert len(made) <= max(1, len(rounds))


def test_documents_of_each_turn_are_counted_one_by_one(model, tmp_path):
    (tmp_path / "template").write_text(FORGETFUL)
    turns = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
    options = ["--source", "chat", "--tokenizer-model", model, "--learn", "each"]
    options += ["--chat-template", tmp_path / "template", "--append-eod"]
    records = [{"messages": turns}, {"messages": chat("unanswered")}, {"messages": turns}]
    prefix, result = prepare(tmp_path, records, *options)
    assert result.exit_code == 0, result.stderr
    metadata = read_metadata(prefix)
    assert (metadata.num_documents, metadata.num_empty_documents) == (4, 1)
    first, second = documents(prefix)[:2]
    assert len(first[0]) < len(second[0])
    assert documents(prefix)[2:] == [first, second]
    prefix, result = prepare(tmp_path, records, *options, "--max-documents", 3, "--overwrite")
    assert result.exit_code == 0 and len(documents(prefix)) == 3
    _, result = prepare(tmp_path, records, *options, "--strict", "--overwrite")
    assert result.exit_code == 1 and "in.jsonl:2: nothing to learn: remove it" in result.stderr
