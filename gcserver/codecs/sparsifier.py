"""The Python side of all sparsifiers: options, decorators, bounds and checks around one encode kernel each.

What may live here: what every sparsifier's class does alike. What one selects, and its kernel, live in its own file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numba import njit

from gcserver.codecs.base import F32, I64, U8, U32, Codec, CodecError, Encoded, Param
from gcserver.codecs.jit import as_bytes, f32_address, level_address, segment_table, state_addresses, u8_address
from gcserver.codecs.packing import EIGHT, EXACT, GAPS, SIXTEEN, VALUES
from gcserver.codecs.sparse import ADD, CHECK, DECODE, MOST_SEGMENTS, OK, PACKED, RULES, sparse_apply

MILLION = 1_000_000
RATIO = Param("ratio", None, 1e-6, 1.0, "share of the elements that is sent, in steps of 1e-6")
_WIDTHS = {"32": EXACT, "16": SIXTEEN, "8": EIGHT}
WIDTH = Param("values", "32", 0, 0, "bits a value is sent in", words=tuple(_WIDTHS))
#: what every sparsifier can be told about its payload
FORM = (Param("packed", 0.0, 0.0, 1.0, "1 for indices as bit-packed gaps", integer=True), WIDTH)


@njit(nogil=True)
def wanted(length, level):
    """k of a segment at a ratio in millionths: at least 1 of a segment that has any."""
    return min(length, max(1, level * length // MILLION))


class Job(NamedTuple):
    """The arguments every encode kernel starts with; addresses are 0 for what there is none of.

    levels: of uint32[m], or 0 for ``level`` everywhere. u, uo: old and new momentum; uo decides whether there is any.
    """

    x: int
    r: int
    u: int
    ro: int
    uo: int
    out: int
    table: int
    m: int
    n: int
    levels: int
    level: int
    form: int
    scale: float
    decay: float
    momentum: float
    nesterov: bool


#: Job's part of a kernel's signature
COMMON = ", ".join(["int64"] * 12 + ["float64"] * 3 + ["boolean"])


class Sparsifier(Codec):
    """Some elements exactly or nearly, nothing of the others; error feedback by default.

    Subclasses add their own parameters before ``FORM``, implement ``setup``, ``own``, ``most`` and ``run``.
    """

    params: ClassVar[tuple[Param, ...]] = FORM
    keeps_residual = True
    takes_momentum = True
    units = "sum"
    conserves = True
    levels = (1, MILLION)

    form: int  #: how payloads are packed: see `sparse`

    def configure(self, packed: float = 0.0, values: str = "32", **own: Any) -> None:
        self.form = PACKED * int(packed) | _WIDTHS[values] << 1
        self._options: dict[str, float | str] = {"packed": packed, "values": values}
        self.setup(**own)

    def values(self) -> Mapping[str, float | str]:
        printed: dict[str, float | str] = dict(self.own())
        # Those of a plain payload go without saying.
        printed.update((p.name, self._options[p.name]) for p in FORM if self._options[p.name] != p.default)
        return printed

    def setup(self, ratio: float = 0.01) -> None:
        """Take the codec's own parameters and set ``level``; by default a ratio in millionths."""
        self.level = round(ratio * MILLION)

    def own(self) -> dict[str, float]:
        """The codec's own parameters in force."""
        return {"ratio": self.level / MILLION}

    def most(self, n: int, segments: int, level: int) -> int:
        """Upper bound of the elements sent of n in so many segments, all of this level."""
        return min(n, level * n // MILLION + segments)

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        """Call the encode kernel: (bytes written, non-finite elements)."""
        raise NotImplementedError

    @classmethod
    def from_level(cls, level: int) -> Codec:
        low, high = cls.levels
        if not low <= level <= high:
            raise CodecError("level", f"{low}..{high} for {cls.name}", level)
        return cls(**cls.of_level(level))

    @classmethod
    def of_level(cls, level: int) -> dict[str, float]:
        """The parameters of a codec of this level."""
        return {"ratio": level / MILLION}

    def at_owner(self) -> Self:
        """This codec as it re-encodes a sum: without momentum, which each contribution went through already."""
        if not self.momentum:
            return self
        values: dict[str, Any] = {**self.own(), **self._options}
        return type(self)(decay=self.decay, momentum=0.0, **values)

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return self.bound(n, segments, self.most(n, segments, self.level))

    def bound(self, n: int, segments: int, total: int) -> int:
        """Upper bound in bytes of a payload of at most ``total`` of n elements."""
        index = 4 * total
        if self.form & PACKED and total:
            groups = -(-total // GAPS)
            # Widths are logarithms of gaps that add up to less than n: most bits if all groups' widest are equal.
            index = groups + min(4 * total, math.ceil(GAPS // 8 * groups * (math.log2(n / groups + 1) + 1)))
        width = self.form >> 1 & 3
        if width == EXACT:
            return 4 + 4 * segments + index + 4 * total
        headers = 4 * min(total, total // VALUES + segments)
        return 4 + 4 * segments + index + headers + (total if width == EIGHT else 2 * total)

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
        table, m, alive = segment_table(segments, n)
        if m > MOST_SEGMENTS:
            raise CodecError("segments", f"at most {MOST_SEGMENTS}", m)
        px, r, ro = state_addresses(self, x, state_in, state_out, m)
        per_segment = level_address(self, levels, m)
        if levels is None:
            most = self.most(n, m, self.level)
        else:
            lengths = np.diff(alive).tolist()
            most = sum(self.most(length, 1, level) for length, level in zip(lengths, levels.tolist(), strict=True))
        target = u8_address("out", out, self.bound(n, m, most), write=True)
        spare = None
        if self.momentum and not ro:
            # Nobody wants the new state, but what is selected has to be added up somewhere.
            spare = np.empty(self.state_floats(n, m), np.float32)
            ro = f32_address("state", spare, spare.size, write=True)
        u, uo = (r and r + 4 * n, ro + 4 * n) if self.momentum else (0, 0)
        job = Job(
            *(px, r, u, ro, uo, target, table, m, n, per_segment, self.level, self.form),
            *(float(scale), self.decay, self.momentum, self.nesterov),
        )
        nbytes, bad = self.run(job, seed)
        del alive, spare
        return Encoded(nbytes, bad)

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        self._apply(payload, f32_address("out", out, out.size, write=True), out.size, float(scale), DECODE)

    def decode_add(self, payload: U8, acc: F32) -> None:
        self._apply(payload, f32_address("acc", acc, acc.size, write=True), acc.size, 1.0, ADD)

    def check(self, payload: U8, n: int) -> None:
        self._apply(payload, 0, n, 1.0, CHECK)

    def _apply(self, payload: U8, out: int, n: int, scale: float, mode: int) -> None:
        data = as_bytes(payload)
        rule = sparse_apply(u8_address("payload", data), data.size, out, n, scale, mode)
        if rule != OK:
            raise CodecError("payload", f"a {self.name} frame of {n} elements: {RULES[rule]}", f"{data.size} bytes")
