"""Conversations that cannot be written, and options that do not go together: one line each."""

from __future__ import annotations

import json

import pytest

from megatron_paradyse.data.supervised import ChatSource
from megatron_paradyse.errors import UserError
from tests.data.chats import FORGETFUL, PLAIN, chat, small_bpe
from tests.data.preparing import prepare


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_bpe(tmp_path_factory.mktemp("tokenizer"))


BAD = {
    "messages that are none": ({"messages": "hi"}, [], r"in.jsonl:1: 'messages' holds a text"),
    "no messages": ({"messages": []}, [], r"in.jsonl:1: 'messages' holds an empty list"),
    "other keys": (
        {"messages": [{"from": "human", "value": "hi"}]},
        [],
        r"in.jsonl:1: message 1 is an object with the keys from, value where one with a role",
    ),
    "another key": ({"conversations": []}, [], r"no key 'messages' \(keys: conversations\): name"),
    "an unanswered list": (
        {"messages": chat("a")},
        [],
        r"no document with a token to learn \(1 empty\): what the role assistant says is learnt$",
    ),
    "nothing to learn": (
        {"messages": chat("a")},
        ["--strict"],
        "in.jsonl:1: nothing to learn: remove it",
    ),
    "what a template raises": (
        {"messages": chat("a", "b")},
        ["--chat-template", "raising"],
        r"in.jsonl:1: the chat template cannot write it \(TemplateError roles must",
    ),
    "reasoning that is dropped": (
        {"messages": chat("a", "<think>x</think>b", "c", "d")},
        ["--chat-template", "forgetful"],
        "in.jsonl:1: message 2: the chat template writes it otherwise .* give --learn each, --lea",
    ),
    "no content": (
        {"messages": [*chat("a"), {"role": "assistant", "value": "b"}]},
        [],
        r"in.jsonl:1: message 2 has no content \(keys: role, value\), which a template may write",
    ),
    "a content of null": (
        {"messages": chat("a", None)},
        [],
        r"in.jsonl:1: message 2 has no content \(keys: role\), which a template may write",
    ),
    "a picture": (
        {"messages": chat([{"type": "image"}], "b")},
        [],
        "in.jsonl:1: message 1 has a list as content, which a template may write as it stands",
    ),
    "half a weight": (
        {"messages": [*chat("a"), {**chat("", "b")[1], "weight": 0.5}]},
        [],
        "in.jsonl:1: message 2 has the weight 0.5: give 0, not to learn it, or 1",
    ),
    "an answer to nothing": (
        {"messages": chat("a", "b")[1:]},
        [],
        'in.jsonl:1: message 1: nothing asks for it, .*: give it "weight": 0, a system message',
    ),
    "other words that ask": (
        {"messages": chat("a", "b")},
        ["--chat-template", "opened", "--learn", "last"],
        "in.jsonl:1: message 2: .* cannot be told: give --chat-template FILE with",
    ),
    "tools": (
        {"messages": chat("a", "b"), "tools": [{"name": "f"}]},
        ["--tokenizer", "SFTTokenizer"],
        "in.jsonl:1: tools, which Megatron's prompt formats do not write: leave them out",
    ),
    "a weight of none": (
        {"messages": [*chat("a"), {**chat("", "b")[1], "weight": 0}, *chat("c", "d")]},
        ["--tokenizer", "SFTTokenizer", "--sft-tokenizer-prompt-format", "nemotron-nano-v2"],
        "in.jsonl:1: message 2 has the weight 0, of which Megatron's prompt formats know nothing",
    ),
    "an empty turn": (
        {"messages": chat("a", "")},
        ["--tokenizer", "SFTTokenizer"],
        r"in.jsonl:1: Megatron's format cannot write it \(ValueError empty assistant turn",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_conversation_that_cannot_be_written_is_named(case, model, tmp_path):
    record, options, said = BAD[case]
    templates = {
        "raising": "{{ raise_exception('roles must alternate') }}",
        "forgetful": FORGETFUL,
        "opened": PLAIN + "{% if add_generation_prompt %}<think>{% endif %}",
    }
    for name, template in templates.items():
        (tmp_path / name).write_text(template)
    options = [tmp_path / option if option in templates else option for option in options]
    chosen = ["--source", "chat", "--tokenizer-model", model, *options]
    _, result = prepare(tmp_path, [record], *chosen)
    assert result.exit_code == 1
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error")]
    with pytest.raises(UserError, match=said):
        raise UserError(line)
    assert not list(tmp_path.glob("out*"))


def test_only_results_of_tools_may_be_no_text_and_only_calls_without_one(tmp_path):
    asked = chat("a")
    results = [{"role": role, "content": {"x": 1}} for role in ("tool", "ipython", "function")]
    calls = [{"role": "assistant", key: [{}]} for key in ("tool_calls", "function_call")]
    path = tmp_path / "in.jsonl"
    for message in (*results, *calls):
        path.write_text(json.dumps({"messages": [*asked, message]}))
        (chunk,) = ChatSource([str(path)], learn="assistant").chunks()
        assert chunk.data.messages == [*asked, message]
    for content in ({"x": 1}, 5, [{"type": "text", "text": 5}], [{"type": "text"}]):
        path.write_text(json.dumps({"messages": [*asked, {"role": "user", "content": content}]}))
        with pytest.raises(UserError, match=r"message 2 has .* as content"):
            list(ChatSource([str(path)], learn="assistant").chunks())


WRONG = {
    "--source chat": "HuggingFaceTokenizer needs --tokenizer-model PATH",
    "--source chat --tokenizer bytes": "--source chat with --tokenizer bytes: give Hugging",
    "--tokenizer SFTTokenizer": "--source jsonl with --tokenizer SFTTokenizer: give another, or",
    "--learn last": "--learn is of --source chat, and this is jsonl: leave it out",
    "--source chat --prompt-key q": "--prompt-key is of --source jsonl, and this is chat",
    "--source chat --sft-tokenizer-prompt-format identity": "--tokenizer SFTTokenizer",
    "--source chat --tokenizer SFTTokenizer --learn last": "--learn last with --tokenizer SFT",
    "--source chat --tokenizer SFTTokenizer --learn each": "--learn each with --tokenizer SFT",
    "--suffix .py": "--suffix is of --source tree, and this is jsonl",
    "--exclude x": "--exclude is of --source tree, and this is jsonl",
    "--split-bases 3": "--split-bases is of --source fasta, and this is jsonl",
    "--chat-template x": "--chat-template is of --source chat, and this is jsonl",
    "--source tree --key x": "--key is of --source jsonl or chat, and this is tree",
    "--kmer 2": "--kmer with --tokenizer bytes: leave it out, or --tokenizer kmer",
    "--source chat --merge-file x": "--merge-file with --source chat: give --tokenizer-model",
    "--source chat --vocab-file x": "--vocab-file with --source chat: give --tokenizer-model",
    "--source chat --chat-template none": "--chat-template none cannot be read",
    "--prompt-key q": "no key 'q' (keys: messages): name it with --prompt-key",
    "--key messages": "'messages' holds a list where text is needed: give --source chat",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_do_not_go_together_are_refused_in_one_line(options, tmp_path):
    _, result = prepare(tmp_path, [{"messages": chat("a", "b")}], *options.split())
    assert result.exit_code == 1
    assert WRONG[options] in result.stderr and not list(tmp_path.glob("out*"))
