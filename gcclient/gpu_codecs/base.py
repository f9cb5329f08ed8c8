"""What a GPU codec must provide, and what encoding gives back.

What may live here: the abstract :class:`GpuCodec`, what it hands its subclasses and gives back, its error type, the
register of classes, the checks of tensors. No method of compression, no spec strings (`specs`).

*Host synchronisation.* Nothing here waits for the device except where a docstring says how often: `Pending.settle`
(once; sidco-e more), and reading or checking a payload that lies on the device. Segments, levels and seeds are plain
numbers, so that every shape is known before a kernel is launched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcclient.gpu_codecs.ops import corrected


class GpuCodecError(ValueError):
    """A GPU codec refused a spec, an argument or a payload; the text says what would be accepted."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What one encode produced: length of the payload in bytes, non-finite elements found, elements saturated.

    If ``nonfinite`` is not 0 the payload and the new state are garbage to be discarded (the step is void).
    """

    nbytes: int
    nonfinite: int
    saturated: int = 0


@dataclass(slots=True)
class Pending:
    """An encode whose kernels have been launched.

    nbytes: the payload's length if it is known already, -1 if `settle` must find it out. nonfinite, saturated: int64
    tensors on the device. finish: what is still to be decided on the host, for codecs whose selection depends on it;
    until then the inputs of the encode must not change.
    """

    nbytes: int
    nonfinite: Tensor
    saturated: Tensor | None = None
    size: Tensor | None = None
    finish: Callable[[], Encoded] | None = None
    _done: Encoded | None = field(default=None, repr=False)

    def settle(self) -> Encoded:
        """The result as plain numbers: waits for the device once, unless the codec says more."""
        if self._done is None:
            if self.finish is not None:
                self._done = self.finish()
            else:
                zero = torch.zeros_like(self.nonfinite)
                parts = [self.nonfinite, zero if self.saturated is None else self.saturated]
                parts.append(zero if self.size is None else self.size)
                bad, over, size = torch.stack(parts).tolist()
                self._done = Encoded(size if self.size is not None else self.nbytes, bad, over)
            self.nbytes = self._done.nbytes
        return self._done


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a spec: its default (None: it must be given) and range, or the words it takes."""

    name: str
    default: float | str | None
    low: float = 0.0
    high: float = 0.0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """One encode with its arguments checked, and what is to be compressed computed.

    v: float32[n], the corrected gradient; momentum: float32[n] or None. Where there is a state_out both lie in it, and
    what of them is not sent has to stay there. parts: (start, stop) of each segment; levels: one for each. state_in,
    state_out, out and seed as given to ``encode``.
    """

    v: Tensor
    momentum: Tensor | None
    parts: list[tuple[int, int]]
    levels: list[int]
    state_in: Tensor | None
    state_out: Tensor | None
    out: Tensor
    seed: int


class GpuCodec(ABC):
    """A compression method with its parameters fixed, on float32 tensors of any one device."""

    id: ClassVar[int]
    name: ClassVar[str]
    params: ClassVar[tuple[Param, ...]] = ()
    keeps_residual: ClassVar[bool] = False
    takes_momentum: ClassVar[bool] = False
    default_decay: ClassVar[float] = 1.0
    shared_seed: ClassVar[bool] = False  #: whether the seed must be the same on all nodes

    level: int
    spec: str

    def __init__(self, spec: str, values: dict[str, Any], decay: float | None, momentum: float, nesterov: bool) -> None:
        """decay: of the residual; None: the codec's own."""
        self.spec = spec
        self.decay = (self.default_decay if decay is None else decay) if self.keeps_residual else 0.0
        self.error_feedback = self.decay > 0.0
        if momentum and not (self.takes_momentum and self.error_feedback):
            raise GpuCodecError(f"{spec}: momentum is for sparsifiers with error feedback")
        self.momentum, self.nesterov = momentum, nesterov
        self.configure(**values)

    def configure(self, **values: Any) -> None:
        """Take the parameters, already in range, and set ``level``: 0 for codecs without any."""
        self.level = 0

    def max_bytes(self, n: int, segments: int = 1) -> int:
        """Upper bound of the payload's bytes, as the daemon's codec gives it."""
        return self.bound(n, segments, self.level)

    def exact_bytes(self, n: int) -> int:
        """Bytes of every payload of n elements in one segment; -1 where they depend on the elements."""
        return self.bound(n, 1, self.level)

    def state_floats(self, n: int, segments: int = 1) -> int:
        """float32 elements of state: the residual, then a momentum, then what else the codec keeps; zeros are fresh."""
        return n * (self.error_feedback + (self.momentum > 0.0))

    def encode(
        self,
        x: Tensor,
        state_in: Tensor | None,
        state_out: Tensor | None,
        out: Tensor,
        segments: Sequence[int] | None = None,
        scale: float = 1.0,
        seed: int = 0,
        levels: Sequence[int] | None = None,
    ) -> Pending:
        """Launch the encoding of ``v = x*scale + decay*residual`` into ``out``, every operation rounded to float32.

        x: float32[n], never written. state_in, state_out: float32[state_floats(n, m)] or None, never the same
        memory. out: uint8[>= max_bytes(n, m)]. All contiguous and on one device. segments: boundaries [0, ..., n]
        on the host, None for one segment. seed: below 2**62. levels: one a segment, or None. Raises GpuCodecError.
        """
        n = vector("x", x, torch.float32)
        parts = boundaries(segments, n)
        each = self.levels_of(levels, len(parts))
        self._check_state(x, state_in, state_out, len(parts))
        nbytes = self.bound(n, len(parts), max(each, default=self.level))
        if vector("out", out, torch.uint8) < nbytes or out.device != x.device:
            raise GpuCodecError(f"out: expected uint8[>= {nbytes}] on {x.device}, got {out.numel()} on {out.device}")
        v, momentum = self.correct(x, state_in, state_out, scale)
        return self.compress(Work(v, momentum, parts, each, state_in, state_out, out, seed))

    @abstractmethod
    def check(self, payload: Tensor, n: int) -> None:
        """Raise GpuCodecError unless ``payload`` (uint8) decodes to n elements. On the device: waits for it."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out (float32[n]) = decoded*scale. payload: uint8, exactly one frame's, best in (pinned) host memory.

        It is checked before the first write; where it lies on the device, that waits.
        """

    @abstractmethod
    def decode_add(self, payload: Tensor, acc: Tensor) -> None:
        """acc += decoded; equal to the bit to decode, then add."""

    # --- for subclasses ---

    @abstractmethod
    def bound(self, n: int, segments: int, level: int) -> int:
        """Upper bound of a payload's bytes when ``level`` is the highest of its segments."""

    @abstractmethod
    def compress(self, work: Work) -> Pending:
        """Launch what comes after the correction: choose, write the payload, leave the new state."""

    def levels_of(self, levels: Sequence[int] | None, m: int) -> list[int]:
        """The level of each of m segments. Codecs with one way to write a segment take no notice of ``levels``."""
        return [self.level] * m

    def given_levels(self, levels: Sequence[int] | None, m: int, low: int, high: int) -> list[int]:
        """``levels_of`` for codecs whose levels are numbers in [low, high]."""
        if levels is None:
            return [self.level] * m
        given = [int(level) for level in levels]
        if len(given) != m or any(not low <= level <= high for level in given):
            raise GpuCodecError(f"levels: expected {m} in [{low}, {high}], one a segment, got {given[:8]}")
        return given

    def correct(
        self, x: Tensor, state_in: Tensor | None, state_out: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """(v, momentum or None), in the new state's memory where there is one."""
        n = x.numel()
        old, new = (None if state is None else state[:n] for state in (state_in, state_out))
        return corrected(x, old, scale, self.decay, new), None

    def _check_state(self, x: Tensor, state_in: Tensor | None, state_out: Tensor | None, m: int) -> None:
        floats = self.state_floats(x.numel(), m)
        for name, state in (("state_in", state_in), ("state_out", state_out)):
            if state is None:
                continue
            if not floats or vector(name, state, torch.float32) != floats:
                raise GpuCodecError(f"{name}: expected {f'float32[{floats}]' if floats else 'None'}")
            if state.device != x.device:
                raise GpuCodecError(f"{name}: expected a tensor on {x.device}, got one on {state.device}")
        inputs = [x.data_ptr()] if state_in is None else [x.data_ptr(), state_in.data_ptr()]
        if x.numel() and state_out is not None and state_out.data_ptr() in inputs and state_out.data_ptr():
            raise GpuCodecError("state_out: expected memory of its own (versions, not updates in place)")

    def target(self, name: str, tensor: Tensor) -> int:
        """Elements of a float32 vector to be written."""
        return vector(name, tensor, torch.float32)

    def refuse(self, n: int, rule: str, payload: Tensor) -> GpuCodecError:
        """What to raise about a payload that breaks a rule."""
        got = f"got {payload.numel()} bytes"
        return GpuCodecError(f"payload: expected a {self.name} frame of {n} elements: {rule}; {got}")


def vector(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Elements of a contiguous, one-dimensional tensor of this dtype; GpuCodecError if it is none."""
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        what = f"{tensor.dtype}{list(tensor.shape)}"
        raise GpuCodecError(f"{name}: expected a contiguous one-dimensional {dtype} tensor, got {what}")
    return tensor.numel()


def boundaries(segments: Sequence[int] | None, n: int) -> list[tuple[int, int]]:
    """(start, stop) of each segment of n elements; GpuCodecError unless they are all of it in ascending order."""
    bounds = [0, n] if segments is None else [int(b) for b in segments]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n or any(a > b for a, b in pairwise(bounds)):
        raise GpuCodecError(f"segments: expected ascending boundaries from 0 to {n}, got {bounds[:8]}")
    return list(pairwise(bounds))


CLASSES: dict[str, type[GpuCodec]] = {}


def register(cls: type[GpuCodec]) -> type[GpuCodec]:
    """Make a class known by its name (a class decorator)."""
    CLASSES[cls.name] = cls
    return cls
