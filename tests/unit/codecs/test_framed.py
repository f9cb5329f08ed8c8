"""What lies between codecs' interface and their kernels: checks, addresses, refusals."""

from typing import ClassVar

import numpy as np
import pytest

from gcserver.codecs import Codec, CodecError, Encoded, parse
from gcserver.codecs.framed import ADD, CHECK, DECODE, OK, Framed, Graded
from gcserver.codecs.tworounds import TwoRounds


class Noted(Framed):
    """Writes nothing, and notes what it is called with."""

    id, name = 40100, "noted"
    units, keeps_residual, conserves = "sum", True, False
    levels = (0, 9)
    rules: ClassVar = {1: "a rule that it breaks"}

    def max_bytes(self, n, segments=1):
        return 8 * segments

    def write(self, call, levels):
        self.call, self.given = call, levels
        return Encoded(0, 0)

    def apply(self, payload, nbytes, out, n, scale, mode):
        self.read = (nbytes, out, n, scale, mode)
        return OK if nbytes else 1


class Fine(Graded, Noted):
    """As many bits an element as its level says, 4 of its own accord."""

    bits = 4

    def bound(self, n, segments, bits):
        return n * bits


def where(array):
    return array.ctypes.data


def test_write_gets_addresses_and_0_for_what_is_not_there():
    codec, x, out = Noted(), np.zeros(6, np.float32), np.zeros(99, np.uint8)
    old, new, levels = np.zeros(6, np.float32), np.zeros(6, np.float32), np.array([1, 9], np.uint32)
    table = np.array([0, 2, 6])
    assert codec.encode(x, old, new, out, table, 0.5, 7, levels) == Encoded(0, 0)
    assert codec.call == (*map(where, (x, old, new, out, table, levels)), 2, 6, 0.5, 7)
    assert codec.call.arrays == codec.call[:5] and codec.given is levels
    codec.encode(x, None, None, out, None)
    assert codec.call[1:3] == (0, 0) and codec.call.levels == 0 and codec.call.m == 1


def test_out_must_hold_what_is_needed():
    x, table = np.zeros(6, np.float32), np.array([0, 2, 6])
    levels = np.array([1, 9], np.uint32)
    for codec, given, needed in ((Noted(), None, 16), (Fine(), None, 24), (Fine(), levels, 54)):
        codec.encode(x, None, None, np.zeros(needed, np.uint8), table, levels=given)
        with pytest.raises(CodecError, match=f"out: expected at least {needed} elements"):
            codec.encode(x, None, None, np.zeros(needed - 1, np.uint8), table, levels=given)
    assert Fine().max_bytes(6, 2) == 24


def test_one_method_checks_and_decodes():
    codec, out = Noted(), np.zeros(6, np.float32)
    codec.decode(b"abc", out, 0.5)
    assert codec.read == (3, where(out), 6, 0.5, DECODE)
    codec.decode_add(b"abc", out)
    assert codec.read == (3, where(out), 6, 1.0, ADD)
    codec.check(b"abc", 5)
    assert codec.read == (3, 0, 5, 1.0, CHECK)
    with pytest.raises(CodecError, match="payload: expected a noted frame of 5 elements: a rule that it breaks, got 0"):
        codec.check(b"", 5)


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "onebit", "qsgd", "topk(ratio=0.1)"])
def test_boundaries_are_checked_whether_a_codec_needs_them_or_not(spec):
    codec, x = parse(spec), np.zeros(10, np.float32)
    out = np.zeros(codec.max_bytes(10, 3), np.uint8)
    for table in ([0, 9], [1, 10], [0, 7, 3, 10], [0, 11, 10]):
        with pytest.raises(CodecError) as caught:
            codec.encode(x, None, None, out, np.array(table))
        assert caught.value.field == "segments"
    codec.encode(x, None, None, out, np.array([0, 4, 4, 10]))


def test_what_lacks_a_method_cannot_be_made():
    for kind in (Codec, Framed, Graded, TwoRounds):
        with pytest.raises(TypeError, match="abstract"):
            kind()
