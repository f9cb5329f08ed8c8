"""Copies around the caches: exactly what is to be copied, from and to any address."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from gcserver.codecs.stream import ordered, prefetch, put


@njit("void(int64, int64, int64)")
def copy(source: int, target: int, n: int) -> None:
    put(source, target, n)
    ordered()


@njit("void(int64)")
def ask(where: int) -> None:
    prefetch(where)


@given(
    n=st.integers(0, 200) | st.sampled_from([1008, 1024, 1040]),
    source=st.integers(0, 70),
    target=st.integers(0, 130),
)
def test_puts_n_elements_and_nothing_beside_them(n: int, source: int, target: int) -> None:
    rng = np.random.default_rng(n)
    numbers = rng.integers(0, 256, 4 * n + 256, np.uint8)
    places = rng.integers(0, 256, 4 * n + 512, np.uint8)
    wanted = places.copy()
    # From the start of a line on, so that every distance to one occurs whatever the arrays' own addresses are.
    begin = -places.ctypes.data % 64 + target
    wanted[begin : begin + 4 * n] = numbers[source : source + 4 * n]
    copy(numbers.ctypes.data + source, places.ctypes.data + begin, n)
    assert np.array_equal(places, wanted)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")
def test_the_processor_is_told_so():
    (copied,) = copy.inspect_asm().values()
    assert "movnt" in copied and ("mfence" in copied or "lock" in copied)
    (asked,) = ask.inspect_asm().values()
    assert "prefetch" in asked


@pytest.mark.parametrize("where", [0, 1, 1 << 46])
def test_asking_for_what_is_not_there_does_nothing(where: int) -> None:
    ask(where)
