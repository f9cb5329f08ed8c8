"""Averages and sums under Horovod's names: `allreduce`, in place, asynchronous, of several tensors at once.

What may live here: what those names take and mean, in terms of push_pull. What may not: exchanging (`calls.py`).

In Horovod a name says nothing of compression: unlike push_pull these are lossless unless ``compression`` is given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import torch

from gcclient.api import current_calls
from gcclient.calls import Call
from gcclient.plain import PlainCall


class Op(enum.Enum):
    """What becomes of the ranks' tensors."""

    Average = "average"
    Sum = "sum"


Average: Final = Op.Average
Sum: Final = Op.Sum


class Compression:
    """Codec specs by the names that Horovod and BytePS have for them. Any other spec is given as text."""

    none: Final = "none"
    fp16: Final = "fp16"
    bf16: Final = "bf16"


class Group:
    """Handle of several calls: over when all are."""

    def __init__(self, calls: list[Call | PlainCall]) -> None:
        self._calls = calls

    @property
    def arrived(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return all(call.arrived for call in self._calls)

    def finish(self) -> list[torch.Tensor]:
        """Wait for all results. Raises the job's failure."""
        return [call.finish() for call in self._calls]


def read_op(op: object, source: str = "op") -> bool:
    """Whether ``op`` is to average. Raises ValueError that names ``source`` for what is neither average nor sum."""
    if op is None or op is Op.Average:
        return True
    if op is Op.Sum:
        return False
    raise ValueError(f"{source}={op!r}: expected gcclient.Average or gcclient.Sum; there is no other reduction")


def _averages(average: object, op: object) -> bool:
    """From Horovod's older argument and its newer one. Raises TypeError and ValueError."""
    if average is None:
        return read_op(op)
    if not isinstance(average, bool):
        raise TypeError(f"average={average!r}: expected True or False, got a {type(average).__name__}")
    if op is not None:
        raise ValueError("give either op or average, which is the older name for it")
    return average


def _start(
    tensor: torch.Tensor, average: object, name: str | None, compression: str | None, op: object, in_place: bool
) -> Call | PlainCall:
    return current_calls().start(tensor, name, _averages(average, op), in_place, compression)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> torch.Tensor:
    """The average of ``tensor`` over all ranks (``op=gcclient.Sum``: the sum), as a new tensor on the same device.

    Dtypes and shapes as :func:`gcclient.push_pull`. Lossless unless a codec is given as ``compression`` to a tensor
    with a ``name``, which its error feedback needs (None: the job's). All ranks must make the same calls in the same
    order. Not differentiable. Raises TypeError (a DTensor), ValueError (an ``op`` that is neither, integers to be
    averaged, both ``op`` and ``average``) and the job's failure.
    """
    return _start(tensor, average, name, compression, op, False).finish()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> torch.Tensor:
    """:func:`allreduce` into ``tensor`` itself, which is returned."""
    _start(tensor, average, name, compression, op, True).finish()
    return tensor


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> Call | PlainCall:
    """:func:`allreduce` that returns a handle at once, for :func:`gcclient.poll` and :func:`gcclient.synchronize`."""
    return _start(tensor, average, name, compression, op, False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> Call | PlainCall:
    """:func:`allreduce_async` whose result replaces the contents of ``tensor`` when it is synchronized."""
    return _start(tensor, average, name, compression, op, True)


def _start_all(
    tensors: Iterable[torch.Tensor],
    average: object,
    name: str | None,
    compression: str | None,
    op: object,
    in_place: bool,
) -> Group:
    names = ((t, None if name is None else f"{name}.{i}") for i, t in enumerate(tensors))
    return Group([_start(tensor, average, each, compression, op, in_place) for tensor, each in names])


def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors, all under way at once. With a ``name`` they are name.0, name.1, ..."""
    return _start_all(tensors, average, name, compression, op, False).finish()


def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` into the tensors themselves, which are returned."""
    given = list(tensors)
    _start_all(given, average, name, compression, op, True).finish()
    return given


def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> Group:
    """:func:`grouped_allreduce` that returns one handle at once; synchronizing it gives the list."""
    return _start_all(tensors, average, name, compression, op, False)


def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: str | None = Compression.none,
    op: Op | None = None,
) -> Group:
    """:func:`grouped_allreduce_async` whose results replace the contents of the tensors when it is synchronized."""
    return _start_all(tensors, average, name, compression, op, True)
