"""The codec interface: what a compression method must provide, its registry and its spec strings.

What may live here: the abstract :class:`Codec`, its result and error types, the registry, and the
parser of spec strings. No kernels and no method of compression: those live one file per family.

A codec is stateless. Everything that changes from step to step (the residual of error feedback) is
passed in as two arrays, the version to read and the version to write, so that a step that turns out
void is undone by not flipping versions (DESIGN section 4, "versions, not undo").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


class CodecError(ValueError):
    """A codec refused its input: a spec, a level, an argument or a payload.

    field: what was wrong (``payload.nbytes``, ``spec.ratio``); expected: what would be accepted;
    got: what came. ``str()`` says all three and, where it helps, what to do (hint).
    """

    def __init__(self, field: str, expected: object, got: object, hint: str = "") -> None:
        self.field, self.expected, self.got, self.hint = field, expected, got, hint
        tail = f"; {hint}" if hint else ""
        super().__init__(f"{field}: expected {expected}, got {got}{tail}")

    def __reduce__(self) -> tuple[object, ...]:
        return (CodecError, (self.field, self.expected, self.got, self.hint))


@dataclass(frozen=True, slots=True)
class Encoded:
    """What one ``encode`` produced.

    nbytes: length of the payload written to the front of ``out``.
    nonfinite: number of NaN or infinite elements found in ``x*scale + residual`` (0 = clean). When it
    is not 0 the payload and ``residual_out`` are garbage to be discarded (the step is void).
    saturated: number of finite elements too large for the wire type, sent as its largest value.
    """

    nbytes: int
    nonfinite: int
    saturated: int = 0


@dataclass(frozen=True, slots=True)
class Param:
    """One numeric parameter of a spec: its name, default and inclusive range, and what it means.

    default None: the parameter must be given.
    """

    name: str
    default: float | None
    low: float
    high: float
    meaning: str

    def read(self, owner: str, text: str) -> float:
        """``text`` as a value in range; CodecError naming the range otherwise."""
        allowed = f"a number in [{show(self.low)}, {show(self.high)}] ({self.meaning})"
        try:
            value = float(text)
        except ValueError:
            raise CodecError(f"{owner}.{self.name}", allowed, repr(text)) from None
        if not self.low <= value <= self.high:
            raise CodecError(f"{owner}.{self.name}", allowed, text)
        return value


EF_DECAY = Param("decay", 1.0, 0.0, 1.0, "share of the old residual that is kept; 0 turns it off")


class Codec:
    """A compression method with its parameters fixed; immutable, one instance per spec.

    Subclasses set the class attributes and implement the five methods. Arrays are one-dimensional,
    C-contiguous and may start at any byte; arrays that are only read may be read-only.
    """

    id: ClassVar[int]  #: stable wire id, uint16
    name: ClassVar[str]
    params: ClassVar[tuple[Param, ...]] = ()
    keeps_residual: ClassVar[bool] = False  #: whether ``+ef`` applies to this method at all
    #: "mean": whoever owns the sum divides before it encodes. "sum": payloads decode to a sum and each
    #: receiver applies the divisor while it decodes, so that residuals stay in sum units.
    units: ClassVar[Literal["mean", "sum"]]
    layout: ClassVar[str] = "flat"
    rounds: ClassVar[int] = 1
    finalise: ClassVar[str] = "mean"
    conserves: ClassVar[bool]  #: whether decoded + residual_out == x*scale + residual_in

    spec: str
    level: int  #: uint32 written to the frame header; with ``id`` enough to decode
    error_feedback: bool
    decay: float

    def __init__(self, *, decay: float = 1.0, **values: float) -> None:
        self.decay = decay if self.keeps_residual else 0.0
        self.error_feedback = self.keeps_residual and self.decay > 0.0
        self.level = 0
        self.configure(**values)
        self.spec = self._spec()

    def configure(self) -> None:
        """Take the parameters (as keywords, already range-checked) and set ``level``."""

    def values(self) -> dict[str, float]:
        """The parameters in force, in the order they are printed."""
        return {}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        """An instance able to decode frames of this level; CodecError if no such level exists."""
        if level != 0:
            raise CodecError("level", f"0 for {cls.name}", level)
        return cls()

    def _spec(self) -> str:
        inner = ",".join(f"{k}={show(v)}" for k, v in self.values().items())
        text = f"{self.name}({inner})" if inner else self.name
        if self.keeps_residual:
            text += "+ef" if self.decay == 1.0 else f"+ef(decay={show(self.decay)})"
        return text

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"

    def max_bytes(self, n: int, segments: int = 1) -> int:
        """Upper bound in bytes of the payload of ``n`` elements in ``segments`` segments."""
        raise NotImplementedError

    def encode(
        self,
        x: F32,
        residual_in: F32 | None,
        residual_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Encoded:
        """Encode ``v = x*scale + decay*residual_in`` into ``out``.

        x: float32[n], never written. residual_in: float32[n], or None for zeros; the decay applies
        when it is read. residual_out: float32[n] that receives ``v - decoded(v)``, or None; never the
        same memory as residual_in or x. out: uint8[>= max_bytes(n, m)]. segments: int64[m+1], the
        boundaries [0, ..., n] of the layers inside, None for a single one; whatever is selected or
        averaged is so per segment. seed: for stochastic codecs. Raises CodecError on wrong arguments.
        """
        raise NotImplementedError

    def check(self, payload: U8, n: int) -> None:
        """Raise CodecError unless ``payload`` decodes to ``n`` elements; afterwards decoding cannot fail."""
        raise NotImplementedError

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        """Overwrite out (float32[n]) with ``decoded*scale``. payload: uint8[nbytes], exactly one frame's.

        Every length and index is checked before the first write; CodecError leaves ``out`` untouched.
        """
        raise NotImplementedError

    def decode_add(self, payload: U8, acc: F32) -> None:
        """``acc += decoded`` (float32[n]) without a dense temporary; equal to the bit to decode, then add."""
        raise NotImplementedError


_BY_NAME: dict[str, type[Codec]] = {}
_BY_ID: dict[int, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Make a codec class known by its name and wire id (a class decorator); both must be free."""
    if _BY_NAME.get(cls.name, cls) is not cls:
        raise CodecError("codec name", f"one not in use by {_BY_NAME[cls.name].__name__}", repr(cls.name))
    if _BY_ID.get(cls.id, cls) is not cls:
        raise CodecError("codec id", f"one not in use by {_BY_ID[cls.id].__name__}", cls.id)
    _BY_NAME[cls.name] = cls
    _BY_ID[cls.id] = cls
    return cls


def _builtin() -> None:
    # Imported on first use: the families import this module.
    from gcserver.codecs import casts, onebit, topk  # noqa: F401


def names() -> list[str]:
    """The registered codecs' names, in the order of their ids."""
    _builtin()
    return [cls.name for _, cls in sorted(_BY_ID.items())]


_TERM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\(([^()]*)\))?\s*")


@lru_cache(maxsize=512)
def parse(spec: str) -> Codec:
    """The codec a spec string names: ``fp16``, ``topk(ratio=0.01)``, ``topk(ratio=0.01)+ef(decay=0.9)``.

    ``parse(c.spec)`` is equivalent to ``c``. Raises CodecError that names what would be accepted.
    """
    _builtin()
    terms = spec.split("+")
    name, given = _term(spec, terms[0])
    cls = _BY_NAME.get(name)
    if cls is None:
        raise CodecError("codec", f"one of {', '.join(names())}", repr(name))
    values = _read(name, cls.params, given)
    seen_ef = False
    for term in terms[1:]:
        decorator, given = _term(spec, term)
        if decorator != "ef" or seen_ef:
            raise CodecError(f"decorator of {name}", "at most one ef(decay=...)", repr(term.strip()))
        if not cls.keeps_residual:
            can = ", ".join(n for n in names() if _BY_NAME[n].keeps_residual)
            raise CodecError(f"decorator of {name}", "none", repr(term.strip()), f"ef applies to {can}")
        seen_ef = True
        values |= _read("ef", (EF_DECAY,), given)
    return cls(**values)


@lru_cache(maxsize=512)
def by_id(id: int, level: int) -> Codec:
    """A codec able to decode frames whose header says ``id`` and ``level``; CodecError if there is none."""
    _builtin()
    cls = _BY_ID.get(id)
    if cls is None:
        known = ", ".join(f"{i} ({c.name})" for i, c in sorted(_BY_ID.items()))
        raise CodecError("codec id", f"one of {known}", id)
    return cls.from_level(level)


def show(value: float) -> str:
    """A number as specs print it: shortest form, no exponent in the usual range (0.001, 1, 1e-06)."""
    return format(value, ".9g")


def _term(spec: str, text: str) -> tuple[str, dict[str, str]]:
    match = _TERM.fullmatch(text)
    if match is None:
        raise CodecError("spec", "name, or name(key=value,...), then optionally +ef(decay=...)", repr(spec))
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, sep, value = (part.strip() for part in item.partition("="))
        if not sep or key in given:
            raise CodecError("spec", "each parameter once, as key=value", repr(item))
        given[key] = value
    return match[1], given


def _read(owner: str, params: tuple[Param, ...], given: dict[str, str]) -> dict[str, float]:
    known = {p.name: p for p in params}
    for key in given:
        if key not in known:
            raise CodecError(f"parameter of {owner}", f"one of {', '.join(known) or 'none'}", repr(key))
    values: dict[str, float] = {}
    for p in params:
        if p.name in given:
            values[p.name] = p.read(owner, given[p.name])
        elif p.default is None:
            allowed = f"a number in [{show(p.low)}, {show(p.high)}] ({p.meaning})"
            raise CodecError(f"{owner}.{p.name}", allowed, "nothing", f"write {owner}({p.name}=...)")
        else:
            values[p.name] = p.default
    return values
