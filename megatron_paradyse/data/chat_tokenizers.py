"""Conversations as tokens, and which of them the assistant said.

By a chat template, or by one of the prompt formats of Megatron's --sft.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_paradyse.data.megatron_tokenizers import MegatronTokenizer
from megatron_paradyse.data.sources import Marked
from megatron_paradyse.data.supervised import ASSISTANT, LEARN_ALL, LEARN_LAST, Conversation
from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.errors import UserError
from megatron_paradyse.units import counted

HUGGING_FACE = "HuggingFaceTokenizer"
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
MARKS = "--chat-template FILE with {% generation %} around what is learnt"
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON may escape
Spans = Sequence[tuple[int, int]]


class TemplateTokenizer(MegatronTokenizer):
    """A Hugging Face tokenizer that writes conversations by its chat template.

    What the assistant said is what the template marks with {% generation %}. Without such marks it
    is what a turn adds to the text of the turns before it and the words that ask for an answer.
    """

    def __init__(self, *, model: str | None, chat_template: str | None = None) -> None:
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

    def conversation(self, conversation: Conversation, *, learn: str) -> Marked:
        """The tokens of a conversation; learnt are the assistant's, those of its last turn, or all.

        A turn whose message has a "weight" of 0 is not.
        """
        messages, tools = conversation
        text = self._written(messages, tools)
        encoded = self._library(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,  # no warning of lengths beyond those of the model
        )
        tokens = self._checked(encoded["input_ids"])
        if learn == LEARN_ALL:
            return Marked(tokens, None)
        said = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        learnt = said[-1:] if learn == LEARN_LAST else said
        learnt = [i for i in learnt if messages[i].get("weight", 1)]
        spans: Spans
        if self._is_marked(tools):
            spans = _blocks_of(learnt, said, self._marked_blocks(messages, tools, text))
        else:
            spans = [self._span(messages, tools, i, text, learn) for i in learnt]
        return Marked(tokens, _overlapping(np.asarray(encoded["offset_mapping"]), spans))

    def _is_marked(self, tools: list[Any] | None) -> bool:
        return bool(GENERATION.search(self._library.get_chat_template(tools=tools)))

    def _marked_blocks(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> Spans:
        """The characters of the text [start, stop) of each {% generation %} block."""
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
        spans: Spans = blocks
        return spans

    def _span(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        turn: int,
        text: str,
        learn: str,
    ) -> tuple[int, int]:
        """The characters of the text [start, stop) that a turn of the assistant adds.

        With its end, where the template writes that only once more follows.
        """
        if turn == 0:
            raise UserError(
                "message 1: nothing asks for it, so that its tokens cannot be told: give it "
                f'"weight": 0, a system message before it, or {MARKS}'
            )
        before = self._written(messages[:turn], tools, add_generation_prompt=True)
        after = self._written(messages[: turn + 1], tools)
        if not (text.startswith(after) and after.startswith(before)):
            last = "" if learn == LEARN_LAST else "--learn last, or "
            raise UserError(
                f"message {turn + 1}: the chat template writes it otherwise when more follows, or "
                f"asks for it in other words, so that its tokens cannot be told: give {last}{MARKS}"
            )
        end = self._library.eos_token or ""
        return len(before), len(after) + len(end) * text.startswith(end, len(after))

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

    def conversation(self, conversation: Conversation, *, learn: str) -> Marked:
        """The tokens of a conversation; learnt are those that Megatron's format learns, or all."""
        messages, tools = conversation
        if tools:
            raise UserError("tools, which Megatron's prompt formats do not write: leave them out")
        try:
            tokens, targets = self._format.tokenize_conversation(
                messages, return_target=True, add_generation_prompt=False
            )
        except Exception as error:  # assertions and errors of Megatron's, and of its template
            raise UserError(f"Megatron's format cannot write it ({_reason(error)})") from error
        learnt = (targets != self._ignored) & (targets != self._format.pad_id)
        return Marked(self._checked(tokens), None if learn == LEARN_ALL else learnt)


def _without_surrogates(text: str) -> str:
    """With U+FFFD for each, so that every other character stays where it is."""
    return SURROGATE.sub("\ufffd", text)


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
