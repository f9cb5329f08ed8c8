"""Speeds of links as people write them."""

from __future__ import annotations

import pytest

from gcproto.rates import read_rate, say_rate


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [("100mbit", 12.5e6), (" 2.5 Gbit/s ", 312.5e6), ("10kbit", 1250.0), ("8bit", 1.0), (".8gbit", 1e8)],
)
def test_rates_are_bits_and_become_bytes(text: str, bytes_a_second: float) -> None:
    assert read_rate(text) == pytest.approx(bytes_a_second)


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1gbit", "1.2.3gbit", "10 mbyte", "9" * 400])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a rate such as 100mbit or 2\.5gbit"):
        read_rate(text)


def test_rates_are_said_as_links_are_named() -> None:
    assert (say_rate(12.5e6), say_rate(1.25e9), say_rate(312.5e6)) == ("100 Mbit/s", "10 Gbit/s", "2.5 Gbit/s")
