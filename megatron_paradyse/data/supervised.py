"""Texts of which a part is learnt, from JSONL: prompts with completions, and conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_paradyse.data.sources import (
    KINDS,
    Chunk,
    JsonlReader,
    Marked,
    SourceError,
    text_of,
    value_of,
)
from megatron_paradyse.data.tokenizers import TokenArray, Tokenizer

ASSISTANT, SYSTEM = "assistant", "system"
TOOLS = ("tool", "ipython", "function")  # roles of results, which may be any JSON value
SAYS = frozenset(("content", "tool_calls", "function_call"))  # keys, of which a message has one
LEARN_ALL, LEARN_LAST, LEARN_EACH = "all", "last", "each"


class PromptSource(JsonlReader):
    """A prompt under `prompt_key`, which is read only, and after it a completion under `key`.

    They are tokenized as one text. What is learnt begins where its tokens are no longer those of
    the prompt alone, so that a token which reaches from one into the other is learnt.
    """

    kind = "prompts"
    learns_all = False
    learns = "what a completion adds to its prompt is learnt"

    def __init__(self, paths: Sequence[str], *, prompt_key: str, key: str = "completion") -> None:
        super().__init__(paths, key=key)
        self.prompt_key = prompt_key

    @property
    def example(self) -> dict[str, Any]:
        return {self.prompt_key: "...", self.key: "..."}

    def chunks(self) -> Iterator[Chunk]:
        for document, (place, record) in enumerate(self.records()):
            prompt = text_of(record, self.prompt_key, place, flag="--prompt-key")
            yield Chunk(document, place, (prompt, text_of(record, self.key, place)))

    def documents(
        self, tokenizer: Tokenizer, parts: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[Iterable[Marked]]:
        for prompt, completion in parts:
            whole = tokenizer.tokenize(prompt + completion)
            first = _common_length(tokenizer.tokenize(prompt), whole)
            yield [Marked(whole, np.arange(len(whole)) >= first)]

    def parameters(self) -> dict[str, Any]:
        return {"prompt_key": self.prompt_key, "key": self.key}


def _common_length(one: TokenArray, other: TokenArray) -> int:
    """With how many equal tokens two arrays begin."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


class Conversation(NamedTuple):
    """Messages, each with a role and what it says, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


class ChatTokenizer(Protocol):
    """What makes tokens of conversations; see chat_tokenizers.py."""

    def documents(self, conversation: Conversation, *, learn: str) -> Iterator[Marked]: ...


class ChatSource(JsonlReader):
    """A list of messages under `key`, as chat templates read them.

    As for Megatron's --sft a system message after the first begins another conversation, which is
    a document of its own. learn: the assistant's turns; the last of them; each as it is when it is
    the last, in several documents where they have to be; or all that is written.
    """

    kind = "chat"
    learns = f"what the role {ASSISTANT} says is learnt"

    def __init__(self, paths: Sequence[str], *, key: str = "messages", learn: str) -> None:
        super().__init__(paths, key=key)
        self.learn = learn
        self.learns_all = learn == LEARN_ALL

    @property
    def example(self) -> dict[str, Any]:
        turns = [{"role": role, "content": "..."} for role in ("user", ASSISTANT)]
        return {self.key: turns}

    def chunks(self) -> Iterator[Chunk]:
        document = 0
        for place, record in self.records():
            messages = self._messages(value_of(record, self.key, place), place)
            for conversation in _conversations(messages):
                yield Chunk(document, place, Conversation(conversation, record.get("tools")))
                document += 1

    def documents(
        self, tokenizer: ChatTokenizer, parts: Iterable[Conversation]
    ) -> Iterator[Iterable[Marked]]:
        for part in parts:
            yield from ([document] for document in tokenizer.documents(part, learn=self.learn))

    def parameters(self) -> dict[str, Any]:
        return {"key": self.key, "learn": self.learn}

    def _messages(self, messages: Any, place: str) -> list[dict[str, Any]]:
        """Each without keys of null, and with a text in place of parts that are texts."""
        if not isinstance(messages, list) or not messages:
            what = "an empty list" if messages == [] else KINDS[type(messages)]
            raise SourceError(
                f"{place}: {self.key!r} holds {what} where messages are needed: {self._one_a_line}"
            )
        checked = []
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                keys = f" with the keys {', '.join(message)[:200]}" * isinstance(message, dict)
                raise SourceError(
                    f"{place}: message {number} is {KINDS[type(message)]}{keys} where one with a "
                    f"role is needed: {self._one_a_line}"
                )
            checked.append(_checked(message, f"{place}: message {number}"))
        return checked


def _checked(message: dict[str, Any], place: str) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("weight", 1) not in (0, 1):
        raise SourceError(
            f"{place} has the weight {message['weight']!r:.40}: give 0, not to learn it, or 1"
        )
    if not message.keys() & SAYS:
        keys = ", ".join(message)[:200]
        raise SourceError(
            f"{place} has no content (keys: {keys}), which a template may write as if it were "
            "empty: give it a text, if only an empty one"
        )
    content = message.get("content", "")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str) and message["role"] not in TOOLS:
        raise SourceError(
            f"{place} has {KINDS[type(content)]} as content, which a template may write as it "
            'stands or leave out: give a text, or a list of {"type": "text", "text": "..."}'
        )
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and type(part.get("text")) is str


def _conversations(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    first = 0
    for number, message in enumerate(messages):
        if message["role"] == SYSTEM and number > first:
            yield messages[first:number]
            first = number
    yield messages[first:]
