"""PREFIX.json: what the tokens of PREFIX.bin and PREFIX.idx are, so that training can tell.

Read strictly: a missing, unknown or contradictory key is an error, because a wrong vocabulary
would train without a sign of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Any

from megatron_paradyse import __version__
from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import has_marks

SCHEMA_VERSION = 1
MAX_METADATA_BYTES = 1 << 20
SOURCES = ("tree", "jsonl", "fasta", "synthetic", "prompts", "chat")
DTYPES = ("uint8", "uint16", "int32")
MARKS = ('"tokenizer"', '"tokenizer_parameters"')  # in the head of every such file


@dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """The contents of PREFIX.json; lengths count the end-of-document token where there is one."""

    tokenizer: str
    tokenizer_parameters: dict[str, Any]
    vocab_size: int
    eod: int | None  # the id that ends a document; None: the tokenizer has none
    append_eod: bool  # every document ends in eod
    dtype: str
    num_documents: int
    num_tokens: int
    max_document_tokens: int
    num_empty_documents: int  # met in the source and left out: no token, or none that is learnt
    source: str
    source_parameters: dict[str, Any]
    num_target_tokens: int | None = None  # that are learnt; None: all, and there is no .targets
    package_version: str = field(default=__version__)
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def is_synthetic(self) -> bool:
        return self.source == "synthetic"

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        if self.num_target_tokens is None:
            del values[
                TARGETS
            ]  # a reader of before targets would refuse it, and may well read this
        return json.dumps(values, indent=2) + "\n"


TARGETS = "num_target_tokens"  # the one key that may be missing
_TYPES: dict[str, tuple[type, ...]] = {
    "tokenizer": (str,),
    "tokenizer_parameters": (dict,),
    "vocab_size": (int,),
    "eod": (int, type(None)),
    "append_eod": (bool,),
    "dtype": (str,),
    "num_documents": (int,),
    "num_tokens": (int,),
    "max_document_tokens": (int,),
    "num_empty_documents": (int,),
    TARGETS: (int, type(None)),
    "source": (str,),
    "source_parameters": (dict,),
    "package_version": (str,),
    "schema_version": (int,),
}


def strip_suffix(prefix: str | os.PathLike[str]) -> str:
    """PREFIX of a data set, of which people may name one of the files."""
    text = os.fspath(prefix)
    root, suffix = os.path.splitext(text)
    return root if suffix in (".bin", ".idx", ".json", ".targets") else text


def read_metadata(prefix: str | os.PathLike[str]) -> DatasetMetadata:
    """Read and check PREFIX.json.

    Raises UserError, one line with the file, the key, the value and the remedy.
    """
    path = strip_suffix(prefix) + ".json"
    if not os.path.isfile(path):
        raise UserError(
            f"{path} does not exist: prepare the data with megatron-paradyse data prepare"
        )
    with open(path, "rb") as stream:
        content = stream.read(MAX_METADATA_BYTES + 1)
    if len(content) > MAX_METADATA_BYTES:
        raise UserError(f"{path}: larger than 1 MiB, so not the metadata of a data set")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): prepare the data again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a JSON object is needed: prepare the data again")
    return _checked(path, values)


def is_synthetic(prefix: str | os.PathLike[str]) -> bool:
    """Whether PREFIX.json says so; it may be missing, or another file that happens to be there."""
    path = strip_suffix(prefix) + ".json"
    return os.path.isfile(path) and has_marks(path, MARKS) and read_metadata(prefix).is_synthetic


def _checked(path: str, values: dict[str, Any]) -> DatasetMetadata:
    remedy = "prepare the data again with this version"
    version = values.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise UserError(
            f"{path}: schema_version must be {SCHEMA_VERSION}, got {version!r:.40}: {remedy}"
        )
    values = {TARGETS: None, **values}
    missing = sorted(_TYPES.keys() - values.keys())
    unknown = sorted(values.keys() - _TYPES.keys())
    if missing or unknown:
        faults = [f"lacks {key}" for key in missing] + [
            f"has unknown {key!r:.60}" for key in unknown
        ]
        raise UserError(f"{path}: {', '.join(faults[:5])}: {remedy}")
    for key, types in _TYPES.items():
        value = values[key]
        # bool is an int to Python, but true is no vocabulary size.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise UserError(f"{path}: {key} must be {expected}, got {value!r:.60}: {remedy}")
    metadata = DatasetMetadata(**values)
    for fault in _contradictions(metadata):
        raise UserError(f"{path}: {fault}: {remedy}")
    return metadata


def _contradictions(m: DatasetMetadata) -> list[str]:
    rules = [
        (m.vocab_size >= 1, f"vocab_size must be at least 1, got {m.vocab_size}"),
        (
            m.eod is None or 0 <= m.eod < m.vocab_size,
            f"eod must be below vocab_size={m.vocab_size}, got {m.eod}",
        ),
        (m.eod is not None or not m.append_eod, "append_eod is true but eod is null"),
        (m.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {m.dtype!r:.40}"),
        (m.source in SOURCES, f"source must be one of {', '.join(SOURCES)}, got {m.source!r:.40}"),
        (m.num_empty_documents >= 0, f"num_empty_documents is {m.num_empty_documents}"),
        (
            0 < m.max_document_tokens <= m.num_tokens and 0 < m.num_documents <= m.num_tokens,
            f"num_documents={m.num_documents}, num_tokens={m.num_tokens} and "
            f"max_document_tokens={m.max_document_tokens} cannot be true together",
        ),
        (
            m.num_target_tokens is None or 0 < m.num_target_tokens <= m.num_tokens,
            f"num_target_tokens is {m.num_target_tokens} of num_tokens={m.num_tokens}",
        ),
    ]
    return [fault for holds, fault in rules if not holds]
