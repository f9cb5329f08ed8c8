"""Packing of codes into bit streams and back, for every width, against numpy's packbits."""

import numpy as np
import pytest
from numba import njit

from gcserver.codecs import bitpack
from tests.unit.codecs import quantise_oracles as oracles
from tests.unit.codecs import vectors


@njit("void(int64, int64, int64, int64, boolean)")
def convert(bits, source, target, n, packing):
    if packing:
        bitpack.pack(bits, source, target, n)
    else:
        bitpack.unpack(bits, source, target, n)


@pytest.mark.parametrize("bits", range(2, 8))
def test_packs_as_numpy_does_and_writes_nowhere_else(bits):
    for n in [*range(70), 1000, 1023, 1024]:
        codes = np.random.default_rng(n).integers(0, 2**bits, n).astype(np.uint8)
        stream, check = vectors.guarded((n * bits + 7) // 8)
        convert(bits, codes.ctypes.data, stream.ctypes.data, n, True)
        check()
        assert stream.tobytes() == (oracles.pack(codes, bits) if n else b"")
        again, check = vectors.guarded(n)
        convert(bits, vectors.unaligned(stream, 3).ctypes.data, again.ctypes.data, n, False)
        check()
        assert np.array_equal(again, codes)


def test_first_code_takes_the_lowest_bits():
    codes, stream = np.array([1, 2, 3, 0, 5, 6, 7, 4], np.uint8), np.zeros(3, np.uint8)
    convert(3, codes.ctypes.data, stream.ctypes.data, 8, True)
    assert stream.tobytes() == (1 | 2 << 3 | 3 << 6 | 5 << 12 | 6 << 15 | 7 << 18 | 4 << 21).to_bytes(3, "little")
