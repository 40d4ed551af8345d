"""Bytes and k-mers: nothing is lost, whatever the chunks, and k-mers equal a plain reference."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_paradyse.data.tokenizers import BytesTokenizer, KmerTokenizer
from megatron_paradyse.errors import UserError

DNA = st.text(alphabet="ACGTacgt").map(str.encode)
DNA_WITH_UNKNOWN = st.text(alphabet="ACGTUNRYSWKMBDHVacgtun").map(str.encode)


def reference_kmers(text: bytes, k: int) -> list[int]:
    """k-mers one at a time, from the definition in KmerTokenizer's docstring."""
    bases = text.decode().upper().replace("U", "T")
    unknown = sum(4**length for length in range(1, k + 1))
    ids = []
    for start in range(0, len(bases), k):
        kmer = bases[start : start + k]
        if set(kmer) <= set("ACGT"):
            longer = sum(4**length for length in range(len(kmer) + 1, k + 1))
            ids.append(longer + int("".join(str("ACGT".index(base)) for base in kmer), 4))
        else:
            ids.append(unknown)
    return ids


def bases(ids: list[int], k: int) -> bytes:
    """The inverse: longer pieces have lower ids, and a piece's bases are its number's digits."""
    text = b""
    for number in ids:
        length = k
        while number >= 4**length:
            number -= 4**length
            length -= 1
        text += bytes(b"ACGT"[number // 4**place % 4] for place in range(length - 1, -1, -1))
    return text


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@given(text=DNA_WITH_UNKNOWN, k=st.integers(1, 6), places=st.lists(st.integers(0, 1000)))
def test_kmers_equal_the_reference_whatever_the_chunks(text, k, places):
    tokenizer = KmerTokenizer(k)
    streamed = [token for ids in tokenizer.stream(cut(text, places)) for token in ids]
    assert streamed == reference_kmers(text, k)
    assert all(0 <= token < tokenizer.eod for token in streamed)


@given(text=DNA, k=st.integers(1, 10))
def test_kmers_give_back_every_base_the_tail_too(text, k):
    tokenizer = KmerTokenizer(k)
    assert bases(tokenizer.tokenize(text).tolist(), k) == text.upper()


def test_kmers_of_three_bases_fit_one_byte():
    tokenizer = KmerTokenizer(3)
    assert (tokenizer.unknown, tokenizer.eod, tokenizer.vocab_size) == (84, 85, 86)
    assert tokenizer.tokenize("AAA TTT\nNAC\t\r\v\fGT").tolist() == [0, 63, 84, 64 + 11]


def test_kmers_with_any_ambiguous_letter_are_unknown():
    tokenizer = KmerTokenizer(2)
    for letter in "NRYSWKMBDHVn":
        assert tokenizer.tokenize("A" + letter).tolist() == [tokenizer.unknown]


def test_foreign_letters_and_bad_k_are_one_line_errors():
    with pytest.raises(UserError, match="'E' is no nucleotide"):
        KmerTokenizer(3).tokenize("ACGE")
    for k in (0, 11):
        with pytest.raises(UserError, match=f"got k={k}"):
            KmerTokenizer(k)


@given(data=st.binary(), places=st.lists(st.integers(0, 1000)))
def test_bytes_give_back_every_byte_whatever_the_chunks(data, places):
    tokenizer = BytesTokenizer()
    ids = np.concatenate([np.empty(0, np.uint8), *tokenizer.stream(cut(data, places))])
    assert ids.tobytes() == data
    assert ids.tolist() == tokenizer.tokenize(data).tolist()
    assert tokenizer.eod == 256 and tokenizer.vocab_size == 257


def test_half_a_surrogate_pair_is_three_bytes():
    assert BytesTokenizer().tokenize("\ud800").tolist() == [0xED, 0xA0, 0x80]
