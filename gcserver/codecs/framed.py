"""Codecs whose payload one kernel writes and one walk reads: what they all do around their kernels.

What may live here: the checks between the interface (`base.Codec`) and kernels, which take addresses, for codecs of
any family. No method of compression, no layout, no kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from gcserver.codecs.base import F32, I64, U8, U32, Codec, CodecError, Encoded
from gcserver.codecs.jit import as_bytes, f32_address, level_address, segment_table, state_addresses, u8_address

CHECK, DECODE, ADD = 0, 1, 2  #: what is asked of a codec that reads a payload
OK = 0  #: no rule of the layout is broken


class Call(NamedTuple):
    """The checked arguments of one encode; addresses are 0 for what there is none of.

    x: of float32[n]; r, ro: of the old and the new state; out: of memory for as many bytes as were `needed`; table: of
    int64[m+1], the segments' boundaries; levels: of uint32[m].
    """

    x: int
    r: int
    ro: int
    out: int
    table: int
    levels: int
    m: int
    n: int
    scale: float
    seed: int

    @property
    def arrays(self) -> tuple[int, int, int, int, int]:
        """(x, r, ro, out, table), with which most encode kernels begin."""
        return self[:5]


class Readable(Codec):
    """A codec that checks and decodes with one method, `apply`."""

    #: what a payload lacks that breaks a rule, by the number `apply` returns
    rules: ClassVar[Mapping[int, str]] = {}

    @abstractmethod
    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        """Check a payload for n elements, then DECODE to, or ADD to, float32[n] at ``out``: OK, or a broken rule.

        payload, out: addresses; nothing is written if a rule is broken, and CHECK needs no out. scale: 1 in ADD.
        """

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        self._read(payload, f32_address("out", out, out.size, write=True), out.size, float(scale), DECODE)

    def decode_add(self, payload: U8, acc: F32) -> None:
        self._read(payload, f32_address("acc", acc, acc.size, write=True), acc.size, 1.0, ADD)

    def check(self, payload: U8, n: int) -> None:
        self._read(payload, 0, n, 1.0, CHECK)

    def _read(self, payload: U8, out: int, n: int, scale: float, mode: int) -> None:
        data = as_bytes(payload)
        rule = self.apply(u8_address("payload", data), data.size, out, n, scale, mode)
        if rule != OK:
            raise CodecError(
                "payload", f"a {self.name} frame of {n} elements: {self.rules[rule]}", f"{data.size} bytes"
            )


class Framed(Readable):
    """A codec that encodes with one method, `write`, once all arrays are checked."""

    @abstractmethod
    def write(self, call: Call, levels: U32 | None) -> Encoded:
        """Call the encode kernel. levels: the array at ``call.levels``, None where there is none."""

    def encode(
        self,
        x: F32,
        state_in: F32 | None,
        state_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
        levels: U32 | None = None,
    ) -> Encoded:
        n = x.size
        # ``bounds`` stays named until the kernel is done with its address.
        table, m, bounds = segment_table(segments, n)
        px, r, ro = state_addresses(self, x, state_in, state_out, m)
        per_segment = level_address(self, levels, m)
        target = u8_address("out", out, self.needed(bounds, levels), write=True)
        return self.write(Call(px, r, ro, target, table, per_segment, m, n, float(scale), seed), levels)


class Graded(Framed):
    """A framed codec whose levels are bits an element."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits an element in segments that have no level of their own."""

    @abstractmethod
    def bound(self, n: int, segments: int, bits: int) -> int:
        """Upper bound of a payload's bytes at so many bits an element."""

    @property
    def own_level(self) -> int:
        return self.bits

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return self.bound(n, segments, self.bits)

    def needed(self, bounds: I64, levels: U32 | None) -> int:
        # terngrad has no levels: (0, 0) lets zeros pass, which say nothing.
        bits = self.bits if levels is None or not self.levels[1] else int(levels.max())
        return self.bound(int(bounds[-1]), bounds.size - 1, bits)
