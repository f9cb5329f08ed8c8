"""The codec interface, version 2: what a compression method must provide, and its register.

What may live here: the abstract :class:`Codec`, its result and error types, and the table of classes. No
spec strings (`spec`), no loading of families or plug-ins (`registry`), no kernels and no method of
compression: those live one file per family.

A codec is stateless. Everything that changes from step to step (the residual of error feedback, a
momentum, a scalar per segment) is passed in as two arrays, the version to read and the version to write,
so that a step that turns out void is undone by not flipping versions (DESIGN section 4, "versions, not undo").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
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
    is not 0 the payload and ``state_out`` are garbage to be discarded (the step is void).
    saturated: number of finite elements too large for the wire type, sent as its largest value.
    """

    nbytes: int
    nonfinite: int
    saturated: int = 0


def show(value: float | str) -> str:
    """A parameter as specs print it: shortest text that reads back as the same number (0.001, 1, 1e-06)."""
    if isinstance(value, str):
        return value
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a spec: its name, default and inclusive range, and what it means.

    default None: the parameter must be given. integer: whole numbers only. words: the parameter is one
    of these words instead of a number (low and high are then without meaning).
    """

    name: str
    default: float | str | None
    low: float
    high: float
    meaning: str
    integer: bool = False
    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """What would be accepted, for people."""
        if self.words:
            return f"one of {', '.join(self.words)} ({self.meaning})"
        kind = "a whole number" if self.integer else "a number"
        return f"{kind} in [{show(self.low)}, {show(self.high)}] ({self.meaning})"

    def read(self, owner: str, text: str) -> float | str:
        """``text`` as a value in range; CodecError naming the range otherwise."""
        field = f"{owner}.{self.name}"
        if self.words:
            if text not in self.words:
                raise CodecError(field, self.allowed, repr(text))
            return text
        try:
            value = float(text)
        except ValueError:
            raise CodecError(field, self.allowed, repr(text)) from None
        if not self.low <= value <= self.high or (self.integer and value != int(value)):
            raise CodecError(field, self.allowed, text)
        return value + 0.0  # -0 prints, and means, 0


class Codec(ABC):
    """A compression method with its parameters fixed; immutable, one instance per spec.

    Subclasses set the class attributes and implement the five methods. Arrays are one-dimensional,
    C-contiguous and may start at any byte; arrays that are only read may be read-only.
    """

    id: ClassVar[int]  #: stable wire id, uint16
    name: ClassVar[str]
    params: ClassVar[tuple[Param, ...]] = ()
    keeps_residual: ClassVar[bool] = False  #: whether ``+ef`` applies to this method at all
    default_decay: ClassVar[float] = 1.0  #: the decay of a spec without ``+ef``; 0: error feedback only if asked for
    takes_momentum: ClassVar[bool] = False  #: whether ``+momentum`` applies (sparsifiers)
    default_momentum: ClassVar[float] = 0.0  #: the momentum of a spec that does not mention it; 0: none
    #: "mean": whoever owns the sum divides before it encodes, receivers do not. "sum": payloads decode to
    #: a sum and each receiver applies the divisor while it decodes, so that residuals stay in sum units.
    units: ClassVar[Literal["mean", "sum"]]
    #: "matrix": wants whole matrices; a matrix is never split by block or shard.
    layout: ClassVar[Literal["flat", "matrix"]] = "flat"
    rounds: ClassVar[int] = 1  #: dependent exchanges a step takes
    #: what the owner's re-encoding makes of the sum of decoded contributions: the sum as well as the method
    #: can say it, or each element's majority
    finalise: ClassVar[Literal["mean", "vote"]] = "mean"
    #: whether a step's seed must be the same on all nodes: from (job, step, key) then, without the node
    shared_seed: ClassVar[bool] = False
    conserves: bool  #: whether decoded + residual_out == x*scale + decay*residual_in; an option may say no
    #: inclusive range of the levels of single segments; (0, 0): the method has no levels
    levels: ClassVar[tuple[int, int]] = (0, 0)
    #: the level at which a segment is sent as it is, or as nearly as the method can; 0: no level says so
    exact: ClassVar[int] = 0
    #: whether a level is a ratio in millionths that each member of a round may choose for itself, step by step
    tunable: ClassVar[bool] = False

    spec: str
    level: int  #: uint32 written to the frame header; with ``id`` enough to decode
    error_feedback: bool
    decay: float
    momentum: float  #: DGC's momentum correction; 0: none
    nesterov: bool

    def __init__(
        self, *, decay: float | None = None, momentum: float | None = None, nesterov: float = 0.0, **values: float | str
    ) -> None:
        kept = self.default_decay if decay is None else decay
        self.decay = kept if self.keeps_residual else 0.0
        self.error_feedback = self.keeps_residual and self.decay > 0.0
        wanted = self.default_momentum if momentum is None else momentum
        # Momentum accumulates what is not sent: without a residual there is nothing to accumulate in.
        if not self.error_feedback and momentum is None:
            wanted = 0.0
        if wanted and not (self.takes_momentum and self.error_feedback):
            raise CodecError(f"decorator of {self.name}", "momentum only together with error feedback", "ef(decay=0)")
        self.momentum = wanted
        self.nesterov = bool(nesterov) and wanted > 0.0
        self.level = 0
        self.configure(**values)
        self.spec = self._spec()

    def configure(self) -> None:  # noqa: B027 - not every codec takes any
        """Take the parameters (as keywords, already range-checked) and set ``level``."""

    def values(self) -> Mapping[str, float | str]:
        """The parameters in force, in the order they are printed."""
        return {}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        """An instance able to decode frames of this level; CodecError if no such level exists."""
        if level != 0:
            raise CodecError("level", f"0 for {cls.name}", level)
        return cls()

    @property
    def own_level(self) -> int:
        """The level of segments that are given none, as the spec says; of no meaning where there are no levels."""
        return self.level

    def _spec(self) -> str:
        inner = ",".join(f"{k}={show(v)}" for k, v in self.values().items())
        text = f"{self.name}({inner})" if inner else self.name
        if self.keeps_residual and (self.decay or self.default_decay):
            text += "+ef" if self.decay == 1.0 else f"+ef(decay={show(self.decay)})"
        if self.momentum or (self.default_momentum and self.error_feedback):
            text += f"+momentum(m={show(self.momentum)}{',nesterov=1' if self.nesterov else ''})"
        return text

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"

    @abstractmethod
    def max_bytes(self, n: int, segments: int = 1) -> int:
        """Upper bound in bytes of the payload of ``n`` elements in ``segments`` segments."""

    def needed(self, bounds: I64, levels: U32 | None) -> int:
        """Bytes that ``out`` must have for segments with these boundaries, each of its own level if they are given.

        bounds: int64[m+1]; levels: uint32[m], or None for the codec's own everywhere.
        """
        return self.max_bytes(int(bounds[-1]), bounds.size - 1)

    def state_floats(self, n: int, segments: int = 1) -> int:
        """float32 elements of state for ``n`` elements in ``segments`` segments; 0 for codecs without state.

        The first n are the residual of every codec that keeps one, so that a plan that changes codecs
        hands it over; a momentum follows, then what else the codec keeps. Zeros mean "fresh".
        """
        return n * (self.error_feedback + (self.momentum > 0.0))

    def at_owner(self) -> Self:
        """This codec as the owner re-encodes a sum with it; the owner's state is sized by that one's state_floats.

        What belongs to a contributor (a momentum) has gone into the contributions and is left out.
        """
        return self

    @abstractmethod
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
        """Encode ``v = x*scale + decay*residual_in`` into ``out``, every operation rounded to float32.

        x: float32[n], never written. state_in: float32[state_floats(n, m)], or None for zeros; the decay
        applies when it is read. state_out: the same shape, receives the next state, the residual
        ``v - decoded(v)`` in its first n elements, or None; never the memory of state_in or x. out:
        uint8[>= needed(segments, levels)]. segments: int64[m+1], the boundaries [0, ..., n] of
        the layers inside, None for a single one; whatever is selected or averaged is so per segment.
        seed: below 2**62, the only source of chance, equal for a step repeated. levels: uint32[m], the
        level of each segment, or None for the codec's own everywhere. Raises CodecError on wrong arguments.
        """

    @abstractmethod
    def check(self, payload: U8, n: int) -> None:
        """Raise CodecError unless ``payload`` decodes to ``n`` elements; afterwards decoding cannot fail."""

    @abstractmethod
    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        """Overwrite out (float32[n]) with ``decoded*scale``. payload: uint8[nbytes], exactly one frame's.

        Every length and index is checked before the first write; CodecError leaves ``out`` untouched.
        """

    @abstractmethod
    def decode_add(self, payload: U8, acc: F32) -> None:
        """``acc += decoded`` (float32[n]) without a dense temporary; equal to the bit to decode, then add."""


BY_NAME: dict[str, type[Codec]] = {}
BY_ID: dict[int, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Make a codec class known by its name and wire id (a class decorator); both must be free."""
    if BY_NAME.get(cls.name, cls) is not cls:
        raise CodecError("codec name", f"one not in use by {BY_NAME[cls.name].__name__}", repr(cls.name))
    if BY_ID.get(cls.id, cls) is not cls:
        raise CodecError("codec id", f"one not in use by {BY_ID[cls.id].__name__}", cls.id)
    BY_NAME[cls.name] = cls
    BY_ID[cls.id] = cls
    return cls
