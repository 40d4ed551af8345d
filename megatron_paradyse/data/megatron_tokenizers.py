"""Any tokenizer that Megatron builds from local files, as this package's Tokenizer.

The network is never used: the files must be there, and the Hugging Face libraries are told to stay
offline before they are imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.errors import UserError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
MODEL_TYPES = ("HuggingFaceTokenizer", *SENTENCEPIECE_TYPES, "TikTokenizer")
MEGATRON_TYPES = (*MODEL_TYPES, "GPT2BPETokenizer")

# Megatron's defaults of its tokenizer flags (megatron-core 0.19).
_MEGATRON_DEFAULTS: dict[str, Any] = {
    "tokenizer_model": None,
    "metadata_path": None,
    "vocab_file": None,
    "merge_file": None,
    "vocab_size": None,
    "pad_vocab_size": False,
    "special_tokens": None,
    "chat_template": None,
    "trust_remote_code": False,
    "tokenizer_hf_no_use_fast": False,
    "tokenizer_hf_no_include_special_tokens": False,
    "tokenizer_sentencepiece_legacy": False,
    "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
    "tiktoken_pattern": "v2",
    "tiktoken_num_special_tokens": 1000,
}
TIKTOKEN_MAX_VOCAB = 2**17
VOCABULARY = "vocabulary"  # the parameter that holds vocabulary_digest()


class MegatronTokenizer:
    """A tokenizer of megatron.core.tokenizers; documents are tokenized whole.

    model: file or folder for all types but GPT2BPETokenizer, which takes vocab_file (vocab.json)
    and merge_file (merges.txt). Raises UserError when files are missing or cannot be read.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | None = None,
        vocab_file: str | None = None,
        merge_file: str | None = None,
    ) -> None:
        self.name = name
        self._files = _required_files(name, model, vocab_file, merge_file)
        self._tokenizer = _build(name, self._files)
        self.vocab_size = int(self._tokenizer.vocab_size)
        eod = getattr(self._tokenizer, "eod", None)
        self.eod = int(eod) if eod is not None and 0 <= int(eod) < self.vocab_size else None

    def stream(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        yield self.tokenize(b"".join(chunks))

    def tokenize(self, text: str | bytes) -> TokenArray:
        """Ids of a document; bytes are read as UTF-8, with U+FFFD for what is not UTF-8."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        # Special tokens (a leading BOS, say) belong to documents, not to the lack of one.
        return self._checked(self._tokenizer.tokenize(text) if text else [])

    def _checked(self, ids: Any) -> TokenArray:
        """int32 ids; UserError for one beyond the vocabulary, which the data could not hold."""
        tokens = np.asarray(ids, dtype=np.int32)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise UserError(
                f"{self.name} gave the id {tokens.max()} beyond its vocabulary of "
                f"{self.vocab_size}: its files do not belong together"
            )
        return tokens

    def parameters(self) -> dict[str, Any]:
        digest = vocabulary_digest(self._tokenizer, self.vocab_size)
        return {**self._files, **({VOCABULARY: digest} if digest else {})}


def vocabulary_digest(tokenizer: Any, num_ids: int) -> str | None:
    """Of what the first num_ids ids of a tokenizer of Megatron's stand for; None: it cannot tell.

    Files of one name, number of ids and end of document may hold other tokens.
    """
    try:
        tokens = tokenizer.inv_vocab
        told = "\n".join(f"{i} {tokens.get(i)!r}" for i in range(num_ids))
    except (AttributeError, KeyError, NotImplementedError):
        return None
    return hashlib.sha256(told.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def _required_files(
    name: str, model: str | None, vocab_file: str | None, merge_file: str | None
) -> dict[str, str]:
    given = {"model": model, "vocab_file": vocab_file, "merge_file": merge_file}
    flags = {
        "model": "--tokenizer-model",
        "vocab_file": "--vocab-file",
        "merge_file": "--merge-file",
    }
    needed = ("vocab_file", "merge_file") if name == "GPT2BPETokenizer" else ("model",)
    files = {}
    for key, path in given.items():
        if key not in needed:
            if path is not None:
                raise UserError(f"{name} takes no {flags[key]}, got {path}: leave it away")
            continue
        if path is None:
            raise UserError(f"{name} needs {flags[key]} PATH, a local file or folder")
        if not os.path.exists(path):
            raise UserError(
                f"{flags[key]} {path} does not exist: {name} reads local files only, "
                "download its files first"
            )
        files[key] = path
    return files


def _build(name: str, files: dict[str, str]) -> Any:
    """Megatron's tokenizer object, with its import's chatter silenced."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("transformers.tokenization_utils_base").addFilter(_is_news)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    arguments = {**_MEGATRON_DEFAULTS, "tokenizer_type": name}
    try:
        if name == "GPT2BPETokenizer":
            return _build_gpt2(build_tokenizer, files)
        arguments["tokenizer_model"] = files["model"]
        if name == "TikTokenizer":
            arguments["vocab_size"] = _tiktoken_vocab_size(files["model"])
        return build_tokenizer(SimpleNamespace(**arguments))
    except UserError:
        raise
    except Exception as error:
        # Each library raises errors of its own; the user needs the file and the reason.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .:")
        raise UserError(
            f"{name} cannot be built from {', '.join(files.values())} ({reason}): give the files "
            "of such a tokenizer"
        ) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a document is longer than the tokenizer's own model takes, which does not run here.

    It is said to result in errors.
    """
    return "longer than the specified maximum" not in record.getMessage()


def _build_gpt2(build_tokenizer: Any, files: dict[str, str]) -> Any:
    """GPT-2's BPE from its two files.

    Megatron's own GPT2BPETokenizer asks the Hugging Face hub for the configuration of "gpt2" even
    when both files are given. The same tokenizer from a local folder needs no network.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(files["vocab_file"], Path(folder, "vocab.json"))
        shutil.copyfile(files["merge_file"], Path(folder, "merges.txt"))
        end = "<|endoftext|>"
        settings = {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": end,
            "eos_token": end,
            "unk_token": end,
        }
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        arguments = {
            **_MEGATRON_DEFAULTS,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": folder,
        }
        return build_tokenizer(SimpleNamespace(**arguments))


def _tiktoken_vocab_size(path: str) -> int:
    """Ranks in the file plus Megatron's 1000 special tokens, at most Megatron's maximum."""
    if not path.endswith(".json"):
        raise UserError(f"TikTokenizer needs a .json file of ranks, got {path}")
    with open(path, encoding="utf-8") as stream:
        ranks = json.load(stream)
    special = int(_MEGATRON_DEFAULTS["tiktoken_num_special_tokens"])
    return min(TIKTOKEN_MAX_VOCAB, len(ranks) + special)
