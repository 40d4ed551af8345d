"""Numbers as users read them."""

from __future__ import annotations

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import (
    bytes_text,
    counted,
    format_count,
    parse_bytes,
    parse_count,
    parse_ratio,
    printable,
    short_number,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 byte"),
        (0, "0.0 MiB"),
        (12, "12 bytes"),  # a budget whose unit was left out
        (52_428, "52,428 bytes"),
        (1 << 17, "0.1 MiB"),
        (-(1 << 20), "-1.0 MiB"),
        (1023 << 20, "1,023.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_bytes_are_never_so_few_that_none_are_left(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1234.56, "1,234.6"), (100, "100.0"), (12.34, "12.3"), (0.4727, "0.473")]
)
def test_short_numbers_have_three_digits(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (1 / 3, "0.333"),
        (999, "999"),
        (999.5, "1000"),
        (1023, "1023"),
        (1024, "1K"),
        (1_023_400, "999K"),
        (1_023_700, "1000K"),
        ((1 << 20) - 1, "1024K"),
        (1 << 20, "1M"),
        (1023 << 20, "1023M"),
        (3 << 29, "1.5G"),
        (5000 << 30, "5000G"),
    ],
)
def test_counts_of_tokens_are_short_and_have_no_exponent(count, text):
    """Three digits would write 999.7 as 1e+03."""
    assert format_count(count) == text


def test_counts_of_things_have_their_noun():
    assert counted(1, "document") == "1 document"
    assert [counted(n, "document") for n in (0, 2000)] == ["0 documents", "2,000 documents"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]


def test_what_a_terminal_would_obey_is_escaped():
    assert printable("a b\n\x1b[0m\udcff'é") == "a b\\n\\x1b[0m\\udcff'é"


@pytest.mark.parametrize(
    ("read", "text", "number"),
    [
        (parse_count, " 0.5m ", 1 << 19),
        (parse_count, "3G", 3 << 30),
        (parse_count, "3gI", 3 << 30),
        (parse_bytes, "12", 12),
        (parse_bytes, "12B", 12),
        (parse_bytes, "1KiB", 1 << 10),
        (parse_bytes, "1 KB", 1000),
        (parse_bytes, "2MiB", 2 << 20),
        (parse_bytes, "2.5GB", 2_500_000_000),
        (parse_bytes, "2TiB", 2 << 40),
        (parse_bytes, "0.3KiB", 307),  # of 307.2
        (parse_ratio, "3/4", 0.75),
        (parse_ratio, "3/1", 3.0),
        (parse_ratio, "1e2", 100.0),
    ],
)
def test_quantities_are_read_as_they_are_written(read, text, number):
    assert read(text) == number


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_count, "4096 tokens", "a count is written like 4096, 128K or 1.5M"),
        (parse_count, "0.3K", "a count must be whole, got '0.3K' = 307.2"),
        (parse_bytes, "76G", "a size is written like 76GiB, 512MiB or 80GB, got '76G'"),
        (parse_bytes, "1kB", "a size is written"),
        (parse_ratio, "0", "above 0, got '0'"),
        (parse_ratio, "2/0", "above 0, got '2/0'"),
        (parse_ratio, "1/3/4", "a factor is written"),
    ],
)
def test_a_quantity_that_may_be_another_is_refused(read, text, message):
    with pytest.raises(UserError, match=message):
        read(text)
