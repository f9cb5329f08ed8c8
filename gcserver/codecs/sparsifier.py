"""The Python side of all sparsifiers: options, decorators, bounds and checks around one encode kernel each.

What may live here: what every sparsifier's class does alike. What one selects, and its kernel, live in its own file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numba import njit

from gcproto import layouts
from gcproto.layouts import EIGHT, EXACT, MILLION, MOST_SEGMENTS, PACKED, SIXTEEN
from gcserver.codecs.base import I64, U32, Codec, CodecError, Encoded, Param
from gcserver.codecs.framed import Call, Framed
from gcserver.codecs.jit import f32_address, u32
from gcserver.codecs.sparse import RULES, sparse_apply

RATIO = Param("ratio", None, 1e-6, 1.0, "share of the elements that is sent, in steps of 1e-6")
_WIDTHS = {"32": EXACT, "16": SIXTEEN, "8": EIGHT}
WIDTH = Param("values", "32", 0, 0, "bits a value is sent in", words=tuple(_WIDTHS))
#: what every sparsifier can be told about its payload
FORM = (Param("packed", 0.0, 0.0, 1.0, "1 for indices as bit-packed gaps", integer=True), WIDTH)


#: ``wanted(length, level)``, compiled
wanted: Any = njit(nogil=True)(layouts.wanted)


@njit(nogil=True)
def level_of(levels, level, s):
    """The level of segment s: its own of the uint32 at ``levels``, or ``level`` where there are none (0)."""
    return level if levels == 0 else np.int64(u32(levels, s + 1)[s])


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


class Sparsifier(Framed):
    """Some elements exactly or nearly, nothing of the others; error feedback by default.

    Subclasses add their own parameters before ``FORM``, implement ``setup``, ``own``, ``most`` and ``run``.
    """

    params: ClassVar[tuple[Param, ...]] = FORM
    keeps_residual = True
    takes_momentum = True
    units = "sum"
    conserves = True
    levels = (1, MILLION)
    exact = MILLION
    tunable = True
    rules = RULES

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

    @abstractmethod
    def run(self, job: Job, seed: int) -> tuple[int, int]:
        """Call the encode kernel: (bytes written, non-finite elements)."""

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
        table = 4 + 4 * segments
        return table + layouts.index_bound(n, total, self.form) + layouts.value_bound(total, segments, self.form)

    def needed(self, bounds: I64, levels: U32 | None) -> int:
        n, m = int(bounds[-1]), bounds.size - 1
        if m > MOST_SEGMENTS:
            raise CodecError("segments", f"at most {MOST_SEGMENTS}", m)
        if levels is None:
            return self.max_bytes(n, m)
        lengths = np.diff(bounds).tolist()
        most = sum(self.most(length, 1, level) for length, level in zip(lengths, levels.tolist(), strict=True))
        return self.bound(n, m, most)

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        n, ro = call.n, call.ro
        spare = None
        if self.momentum and not ro:
            # Nobody wants the new state, but what is selected has to be added up somewhere.
            spare = np.empty(self.state_floats(n, call.m), np.float32)
            ro = f32_address("state", spare, spare.size, write=True)
        u, uo = (call.r and call.r + 4 * n, ro + 4 * n) if self.momentum else (0, 0)
        job = Job(
            *(call.x, call.r, u, ro, uo, call.out, call.table, call.m, n, call.levels, self.level, self.form),
            *(call.scale, self.decay, self.momentum, self.nesterov),
        )
        nbytes, bad = self.run(job, call.seed)
        del spare
        return Encoded(nbytes, bad)

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        return int(sparse_apply(payload, nbytes, out, n, scale, mode))
