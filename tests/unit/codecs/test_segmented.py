"""The walk over a table of segments, with data of as many bytes as their words say."""

import struct

import numpy as np
import pytest
from numba import njit

from gcserver.codecs.framed import OK
from gcserver.codecs.segmented import LENGTHS, PADDING, RULES, SHORT, SIZE, WORD, segments_check


@njit
def extent(length, word):
    """``word`` bytes, of whose last one 4 bits are in use; 9 is no word."""
    return (word if word != 9 else -1), 4 if word > 0 else 0


check = segments_check(extent)


def frame(*segments, data=b""):
    return struct.pack(f"<I{2 * len(segments)}I", len(segments), *(part for s in segments for part in s)) + data


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (frame((10, 0)), OK),
        (frame((4, 2), (0, 0), (6, 1), data=b"\xff\x0f\x0f"), OK),
        (b"\1\0", SHORT),
        (frame((10, 0))[:-1], SHORT),
        (struct.pack("<I", 2**32 - 1), SHORT),
        (frame((10, 2), data=b"\0"), SHORT),
        (frame((4, 0), (7, 0)), LENGTHS),
        (frame((4, 0), (5, 0)), LENGTHS),
        (frame((2**32 - 1, 0)), LENGTHS),
        (frame((10, 9), data=bytes(9)), WORD),
        (frame((10, 1), data=bytes(2)), SIZE),
        (frame((4, 1), (6, 1), data=b"\x10\0"), PADDING),
    ],
)
def test_each_rule(payload, rule):
    data = np.frombuffer(payload, np.uint8)
    assert check(data.ctypes.data, data.size, 10) == rule
    assert rule in {OK, WORD, PADDING, *RULES}
