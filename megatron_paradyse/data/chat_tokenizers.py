"""Conversations as tokens, and which of them the assistant said.

By a chat template, or by one of the prompt formats of Megatron's --sft.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_paradyse.data.megatron_tokenizers import MegatronTokenizer
from megatron_paradyse.data.sources import Marked
from megatron_paradyse.data.supervised import (
    ASSISTANT,
    LEARN_ALL,
    LEARN_EACH,
    LEARN_LAST,
    Conversation,
)
from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.errors import UserError
from megatron_paradyse.units import counted

HUGGING_FACE = "HuggingFaceTokenizer"
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
MARKS = "--chat-template FILE with {% generation %} around what is learnt"
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON may escape
Spans = Sequence[tuple[int, int]]


class _Turn(NamedTuple):
    """One of the assistant: the index of its message, and what a template writes."""

    message: int
    before: str  # up to it, with the words that ask for it
    after: str  # up to its end

    def is_in(self, text: str) -> bool:
        return text.startswith(self.after) and self.after.startswith(self.before)


def _told_otherwise(turn: _Turn, learn: str) -> UserError:
    others = "" if learn in (LEARN_LAST, LEARN_EACH) else "--learn each, --learn last, or "
    return UserError(
        f"message {turn.message + 1}: the chat template writes it otherwise when more follows, or "
        f"asks for it in other words, so that its tokens cannot be told: give {others}{MARKS}"
    )


class TemplateTokenizer(MegatronTokenizer):
    """A Hugging Face tokenizer that writes conversations by its chat template.

    What the assistant said is what the template marks with {% generation %}. Without such marks it
    is what a turn adds to the text of the turns before it and the words that ask for an answer.
    """

    def __init__(self, *, model: str | None, chat_template: str | None) -> None:
        """chat_template: the text of one to use in place of the tokenizer's own.

        Raises UserError where there is none, or where tokens do not tell their place in the text.
        """
        super().__init__(HUGGING_FACE, model=model)
        self._library = self._tokenizer._tokenizer.tokenizer  # what Megatron's wraps
        if chat_template is not None:
            self._library.chat_template = chat_template
        if not self._library.chat_template:
            raise UserError(f"{model} has no chat template: give --chat-template FILE")
        if not self._library.is_fast:
            raise UserError(
                f"{model} does not tell of which text its tokens are: give a tokenizer that has a "
                "tokenizer.json"
            )

    def parameters(self) -> dict[str, Any]:
        template = json.dumps(self._library.chat_template)
        digest = hashlib.sha256(template.encode()).hexdigest()[:16]
        return {**super().parameters(), "chat_template": digest}

    def documents(self, conversation: Conversation, *, learn: str) -> Iterator[Marked]:
        """The tokens of a conversation; learnt are the assistant's, those of its last turn, or all.

        "each": turns that it writes otherwise than when they were the last follow in documents of
        their own, each with as many of them as it writes alike. A turn whose message has a "weight"
        of 0 is not learnt.
        """
        messages, tools = conversation
        text = self._written(messages, tools)
        if learn == LEARN_ALL:
            yield Marked(self._encoded(text)[0], None)
            return
        learnt = _said_by_assistant(messages)
        learnt = learnt[-1:] if learn == LEARN_LAST else learnt
        learnt = [i for i in learnt if messages[i].get("weight", 1)]
        if learn == LEARN_EACH:
            yield from self._documents_of_each(messages, tools, text, learnt)
        elif self._is_marked(tools):
            yield self._learning_blocks(messages, tools, text, learnt)
        else:
            turns = [self._turn(messages, tools, i) for i in learnt]
            for turn in turns:
                if not turn.is_in(text):
                    raise _told_otherwise(turn, learn)
            yield self._learning(text, [self._span(turn, text) for turn in turns])

    def _encoded(self, text: str) -> tuple[TokenArray, TokenArray]:
        """Tokens [n] and their offsets in the text [n, 2]."""
        encoded = self._library(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,  # no warning of lengths beyond those of the model
        )
        return self._checked(encoded["input_ids"]), np.asarray(encoded["offset_mapping"])

    def _learning(self, text: str, spans: Spans) -> Marked:
        tokens, offsets = self._encoded(text)
        return Marked(tokens, _overlapping(offsets, spans))

    def _documents_of_each(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str, learnt: list[int]
    ) -> Iterator[Marked]:
        """The longest last; without a turn to learn the whole, of which nothing is learnt."""
        marked = self._is_marked(tools)
        turns = [self._turn(messages, tools, i, marked=marked) for i in learnt]
        documents = [] if turns else [(messages, text, turns)]
        while turns:
            told = [turn for turn in turns if turn.is_in(text)]
            if told:
                documents.append((messages, text, told))
            turns = [turn for turn in turns if not turn.is_in(text)]
            if turns and text == turns[-1].after:
                raise _told_otherwise(turns[-1], LEARN_EACH)
            if turns:
                messages, text = messages[: turns[-1].message + 1], turns[-1].after
        for part, written, told in reversed(documents):
            if marked:
                yield self._learning_blocks(part, tools, written, [turn.message for turn in told])
            else:
                yield self._learning(written, [self._span(turn, written) for turn in told])

    def _is_marked(self, tools: list[Any] | None) -> bool:
        return bool(GENERATION.search(self._library.get_chat_template(tools=tools)))

    def _learning_blocks(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        text: str,
        learnt: list[int],
    ) -> Marked:
        """Of the {% generation %} blocks of a template those of the turns learnt."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Annotated to return a str, it returns two lists.
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self._library.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self._library.special_tokens_map,
        )
        (written,), (blocks,) = rendered
        assert _without_surrogates(written) == text, "the library writes it otherwise itself"
        return self._learning(text, _blocks_of(learnt, _said_by_assistant(messages), blocks))

    def _turn(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        message: int,
        *,
        marked: bool = False,
    ) -> _Turn:
        """marked: the template tells what of it is learnt, whatever asks for it."""
        after = self._written(messages[: message + 1], tools)
        if marked:
            return _Turn(message, "", after)
        if message == 0:
            raise UserError(
                "message 1: nothing asks for it, so that its tokens cannot be told: give it "
                f'"weight": 0, a system message before it, or {MARKS}'
            )
        before = self._written(messages[:message], tools, add_generation_prompt=True)
        return _Turn(message, before, after)

    def _span(self, turn: _Turn, text: str) -> tuple[int, int]:
        """The characters of a text [start, stop) that a turn which is in it adds.

        With its end, where the template writes that only once more follows.
        """
        end, stop = self._library.eos_token or "", len(turn.after)
        return len(turn.before), stop + len(end) * text.startswith(end, stop)

    def _written(self, messages: list[dict[str, Any]], tools: list[Any] | None, **how: Any) -> str:
        try:
            text = self._library.apply_chat_template(messages, tools=tools, tokenize=False, **how)
        except Exception as error:  # whatever a template raises, and what runs it
            raise UserError(f"the chat template cannot write it ({_reason(error)})") from error
        return _without_surrogates(text)


class PromptFormatTokenizer(MegatronTokenizer):
    """A Hugging Face tokenizer with a prompt format, of Megatron's --sft-tokenizer-prompt-format.

    Tokens and targets are those of Megatron's --sft, whose padding token is never learnt.
    """

    def __init__(self, *, model: str | None, prompt_format: str) -> None:
        super().__init__(HUGGING_FACE, model=model)
        from megatron.core.tokenizers.text.libraries.sft_tokenizer import IGNORE_INDEX, SFTTokenizer

        self._ignored = IGNORE_INDEX
        self._prompt_format = prompt_format
        try:
            self._format = SFTTokenizer(self._files["model"], prompt_format)
        except NotImplementedError as error:
            raise UserError(
                f"--sft-tokenizer-prompt-format {prompt_format} is none of Megatron's: give "
                "nemotron-h-aligned, nemotron-nano-v2, identity or default"
            ) from error

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "prompt_format": self._prompt_format}

    def documents(self, conversation: Conversation, *, learn: str) -> Iterator[Marked]:
        """The tokens of a conversation; learnt are those that Megatron's format learns, or all."""
        messages, tools = conversation
        if tools:
            raise UserError("tools, which Megatron's prompt formats do not write: leave them out")
        if learn != LEARN_ALL:
            _refuse_weights(messages)
        try:
            tokens, targets = self._format.tokenize_conversation(
                messages, return_target=True, add_generation_prompt=False
            )
        except Exception as error:  # assertions and errors of Megatron's, and of its template
            raise UserError(f"Megatron's format cannot write it ({_reason(error)})") from error
        learnt = (targets != self._ignored) & (targets != self._format.pad_id)
        yield Marked(self._checked(tokens), None if learn == LEARN_ALL else learnt)


def _refuse_weights(messages: list[dict[str, Any]]) -> None:
    """UserError for a message that is not to be learnt: a prompt format learns what it learns."""
    for number, message in enumerate(messages, start=1):
        if not message.get("weight", 1):
            raise UserError(
                f"message {number} has the weight 0, of which Megatron's prompt formats know "
                f"nothing: leave it out, or give --tokenizer {HUGGING_FACE}"
            )


def _without_surrogates(text: str) -> str:
    """With U+FFFD for each, so that every other character stays where it is."""
    return SURROGATE.sub("\ufffd", text)


def _said_by_assistant(messages: list[dict[str, Any]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]


def _blocks_of(learnt: list[int], said: list[int], blocks: Spans) -> Spans:
    """What a template marks of the turns learnt among those that are said."""
    if learnt == said:
        return blocks
    if len(blocks) != len(said):
        raise UserError(
            f"the chat template marks {counted(len(blocks), 'part')} with {{% generation %}} of "
            f"{counted(len(said), 'turn')} of the assistant, so that single turns cannot be told: "
            "leave out --learn and weights"
        )
    return [blocks[said.index(i)] for i in learnt]


def _overlapping(offsets: TokenArray, spans: Spans) -> TokenArray:
    """bool [n]: whether any character of a token, at offsets [n, 2], lies in one of the spans.

    Tokens of nothing but spaces may be told to end where they do and to have no character, as
    GPT-2's are; they begin where the token before them ends.
    """
    spans = [(start, stop) for start, stop in spans if start < stop]  # a token may reach over none
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=bool)
    begin, end = offsets.T
    begin = np.where(begin < end, begin, np.minimum(begin, np.append(0, end[:-1])))
    starts, stops = np.asarray(spans).T
    span = np.searchsorted(stops, begin, side="right")
    starts = np.append(starts, np.iinfo(np.int64).max)
    return (end > starts[span]) & (end > begin)


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:160]
