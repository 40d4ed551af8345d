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

HUGGING_FACE = "HuggingFaceTokenizer"
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
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
        said = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        learnt = said[-1:] if learn == LEARN_LAST else said
        learnt = [i for i in learnt if messages[i].get("weight", 1)]
        if learn != LEARN_ALL and learnt == said and self._is_marked(tools):
            return self._by_marks(messages, tools)
        text = self._written(messages, tools)
        encoded = self._library(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.asarray(encoded["input_ids"], dtype=np.int32)
        if learn == LEARN_ALL:
            return Marked(tokens, None)
        spans = [self._span(messages, tools, i, text) for i in learnt]
        return Marked(tokens, _overlapping(np.asarray(encoded["offset_mapping"]), spans))

    def _is_marked(self, tools: list[Any] | None) -> bool:
        return bool(GENERATION.search(self._library.get_chat_template(tools=tools)))

    def _by_marks(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Marked:
        encoded = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = np.asarray(encoded["input_ids"], dtype=np.int32)
        return Marked(tokens, np.asarray(encoded["assistant_masks"], dtype=bool))

    def _span(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, turn: int, text: str
    ) -> tuple[int, int]:
        """The characters of the text [start, stop) that a turn of the assistant adds."""
        before = self._written(messages[:turn], tools, add_generation_prompt=True)
        after = self._written(messages[: turn + 1], tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                f"message {turn + 1}: the chat template writes it otherwise when more follows, or "
                "asks for it in other words, so that its tokens cannot be told: give --learn last, "
                "or --chat-template FILE with {% generation %} around what is learnt"
            )
        return len(before), len(after)

    def _written(self, messages: list[dict[str, Any]], tools: list[Any] | None, **how: Any) -> str:
        return self._apply(messages, tools, tokenize=False, **how)

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, **how: Any) -> Any:
        try:
            return self._library.apply_chat_template(messages, tools=tools, **how)
        except Exception as error:  # whatever a template raises, and what runs it
            raise UserError(f"the chat template cannot write it ({_reason(error)})") from error


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
        return Marked(tokens.astype(np.int32), None if learn == LEARN_ALL else learnt)


def _overlapping(offsets: TokenArray, spans: Spans) -> TokenArray:
    """bool [n]: whether any character of a token, at offsets [n, 2], lies in one of the spans."""
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=bool)
    starts, stops = np.asarray(spans).T
    span = np.searchsorted(stops, offsets[:, 0], side="right")
    starts = np.append(starts, np.iinfo(np.int64).max)
    return (offsets[:, 1] > starts[span]) & (offsets[:, 1] > offsets[:, 0])


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:160]
