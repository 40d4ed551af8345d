"""Numbers as users read them."""

from __future__ import annotations

import pytest

from megatron_paradyse.units import bytes_text, short_number


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 byte"),
        (0, "0.0 MiB"),
        (12, "12 bytes"),  # a budget whose unit was left out
        (1 << 17, "0.1 MiB"),
        (-(1 << 20), "-1.0 MiB"),
        (1023 << 20, "1,023.0 MiB"),
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
