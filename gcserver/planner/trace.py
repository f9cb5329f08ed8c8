"""When the gradients of one backward pass become ready: what every planner starts from.

What may live here: the record of a traced backward pass, and its JSON form. What may not: files, costs, plans,
measuring.

A trace file is ``{"model": ..., "source": ..., "tensors": [{"name", "elements", "gap_us"}, ...]}``: tensors in the
order of back-propagation, each with the microseconds since the one before it became ready.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gcproto.packed import UNREADABLE


class TraceError(ValueError):
    """A trace file that cannot be read: names the file, what was expected and what is there."""


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One gradient: ``elements`` values, there ``ready`` seconds after the backward pass began."""

    name: str
    elements: int
    ready: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The gradients of one backward pass in the order they become ready; ``forward``: seconds before it begins."""

    model: str
    tensors: tuple[TracedTensor, ...]
    forward: float = 0.0

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)

    @property
    def backward(self) -> float:
        """Seconds from the start of the backward pass to its last gradient."""
        return self.tensors[-1].ready if self.tensors else 0.0


class _Tensor(msgspec.Struct):
    name: str
    elements: int
    gap_us: float


class _File(msgspec.Struct):
    model: str
    tensors: list[_Tensor]


def parse_trace(text: bytes, name: str) -> Trace:
    """The trace in a file's content; ``name`` is the file's. Raises :class:`TraceError`."""
    try:
        file = msgspec.json.decode(text, type=_File)
    except UNREADABLE as error:
        raise TraceError(f"{name} is no trace: {error}") from error
    tensors = []
    ready = 0.0
    for t in file.tensors:
        if t.elements <= 0 or not 0.0 <= t.gap_us < float("inf"):
            raise TraceError(
                f"{name}: tensor {t.name!r} has {t.elements} elements and a gap of {t.gap_us} us; expected at least "
                "one element and a gap that is not negative"
            )
        ready += t.gap_us * 1e-6
        tensors.append(TracedTensor(t.name, t.elements, ready))
    return Trace(file.model, tuple(tensors))
