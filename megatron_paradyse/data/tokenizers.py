"""Tokenizers that stream: bytes and DNA k-mers, and what every tokenizer offers.

Tokenizers that Megatron builds (HuggingFace, SentencePiece, ...) are in megatron_tokenizers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from megatron_paradyse.errors import UserError

TokenArray = np.ndarray[Any, np.dtype[Any]]

MAX_K = 10  # 4**10 = 1,048,576 k-mers: a larger vocabulary would hold no useful embedding
UNKNOWN_BASE = 4
FOREIGN = 255
IUPAC_AMBIGUOUS = b"NRYSWKMBDHV"
NUCLEOTIDES = b"ACGTU" + IUPAC_AMBIGUOUS
WHITESPACE = b" \t\r\n\v\f"


class Tokenizer(Protocol):
    """What `data prepare` needs of a tokenizer, and what training learns of it."""

    name: str
    vocab_size: int  # number of ids, special ones included
    eod: int | None  # the id that ends a document; None: the tokenizer has none

    def stream(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        """Token ids of one document that arrives in chunks cut anywhere, in arrays of ids."""
        ...

    def tokenize(self, text: str | bytes) -> TokenArray:
        """Token ids of one whole document, without the end-of-document id."""
        ...

    def parameters(self) -> dict[str, Any]:
        """What, besides the name, rebuilds this tokenizer; JSON values only."""
        ...


class BytesTokenizer:
    """One token per byte: ids 0-255 are the byte values, 256 ends a document. Never fails."""

    name = "bytes"
    vocab_size = 257
    eod = 256

    def stream(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        for chunk in chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def tokenize(self, text: str | bytes) -> TokenArray:
        return np.frombuffer(_as_bytes(text), dtype=np.uint8).astype(np.uint16)

    def parameters(self) -> dict[str, Any]:
        return {}


class KmerTokenizer:
    """DNA in non-overlapping k-mers, the tokens that the paper uses for GRCh38 (k = 3).

    The ids, for A, C, G, T as the digits 0, 1, 2, 3 of a number of base 4:

        0 .. 4^k - 1                the k-mers
        then 4^(k-1), ..., 4^1 ids  the last k-1, ..., 1 bases of a document, so that none is lost
        vocab_size - 2              unknown: a k-mer with N or another ambiguous IUPAC letter
        vocab_size - 1              end of document

    k = 3: 64 + 16 + 4 + 2 = 86 ids, which fit one byte. Lower case (soft-masked) letters are read
    as upper case, U as T, and white space is skipped. Other letters raise UserError.
    """

    name = "kmer"

    def __init__(self, k: int = 3) -> None:
        if not 1 <= k <= MAX_K:
            raise UserError(f"k-mers need 1 <= k <= {MAX_K}, got k={k}: the paper uses k=3")
        self.k = k
        self._place_values = 4 ** np.arange(k - 1, -1, -1, dtype=np.int32)
        # tail_start[j]: first id of the tails of j bases; longer tails come first.
        self._tail_start = {k: 0}
        for length in range(k - 1, -1, -1):
            self._tail_start[length] = self._tail_start[length + 1] + 4 ** (length + 1)
        self.unknown = self._tail_start[0]
        self.eod = self.unknown + 1
        self.vocab_size = self.unknown + 2

    def stream(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        """Ids of one document; at most k-1 bases wait from one chunk to the next."""
        waiting = np.empty(0, dtype=np.uint8)
        for chunk in chunks:
            digits = np.concatenate([waiting, _base_digits(chunk)])
            whole = len(digits) - len(digits) % self.k
            waiting = digits[whole:]
            if whole:
                yield self._ids(digits[:whole], self.k)
        if len(waiting):
            yield self._ids(waiting, len(waiting))

    def tokenize(self, text: str | bytes) -> TokenArray:
        return np.concatenate([np.empty(0, np.int32), *self.stream([_as_bytes(text)])])

    def parameters(self) -> dict[str, Any]:
        return {"k": self.k}

    def _ids(self, digits: TokenArray, length: int) -> TokenArray:
        """Ids of digits [tokens * length] that are read as tokens of `length` bases."""
        grouped = digits.reshape(-1, length)
        ids = np.zeros(len(grouped), dtype=np.int32)
        unknown = np.zeros(len(grouped), dtype=bool)
        for column, place_value in enumerate(self._place_values[self.k - length :]):
            ids += grouped[:, column] * place_value
            unknown |= grouped[:, column] == UNKNOWN_BASE
        return np.where(unknown, np.int32(self.unknown), ids + self._tail_start[length])


def _digit_table() -> TokenArray:
    table = np.full(256, FOREIGN, dtype=np.uint8)
    for digit, letters in enumerate([b"Aa", b"Cc", b"Gg", b"TtUu"]):
        table[list(letters)] = digit
    table[list(IUPAC_AMBIGUOUS + IUPAC_AMBIGUOUS.lower())] = UNKNOWN_BASE
    return table


_DIGITS = _digit_table()


def _base_digits(chunk: bytes) -> TokenArray:
    """Letters as digits: A 0, C 1, G 2, T and U 3, ambiguous 4."""
    digits = _DIGITS[np.frombuffer(chunk.translate(None, WHITESPACE), dtype=np.uint8)]
    if len(digits) and digits.max() == FOREIGN:
        foreign = foreign_letter(chunk)
        assert foreign is not None
        raise UserError(
            f"{foreign} is no nucleotide: k-mers read A, C, G, T, U and the IUPAC letters "
            f"{IUPAC_AMBIGUOUS.decode()}; for other text use --tokenizer bytes"
        )
    return digits


def foreign_letter(chunk: bytes) -> str | None:
    """The first letter that is neither nucleotide nor white space, quoted; None: there is none."""
    others = chunk.translate(None, NUCLEOTIDES + NUCLEOTIDES.lower() + WHITESPACE)
    return repr(chr(others[0])) if others else None


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text
