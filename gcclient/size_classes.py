"""Places that unnamed tensors of many shapes share, by the class that their size falls into.

What may live here: the classes, what goes before and after a tensor in such a place, how a rank notices that another
one brought another shape, and what it does then. What may not: which tensor gets which place (`places.py`).

Sections cannot be given back, so a place for every shape would be memory that only grows. A shared place is a head, the
tensor's elements, and zeros: what a longer tensor left there may be no number. Lanes compare addresses and know nothing
of shapes, so the head says which one it is, in elements of the tensor's own dtype that are summed with it: two for each
bit of a digest of the shape, (1, 0) or (0, 1). Of two digests each has a one where the other has a zero. Whoever finds
anything where it put zeros knows that somebody brought another shape; all ranks find that, in sums as in averages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from gcclient import device
from gcclient.bell import Wait
from gcclient.device import Bytes
from gcclient.domain import Domain
from gcclient.errors import GradcommError, StepTimeout, TensorMismatch
from gcclient.session import GRACE, Session
from gcproto.dtypes import DType
from gcproto.manifest import PAGE, Section, TensorSpec
from gcproto.messages import DeclareSection

#: Elements of a head. In any dtype they are less than a page, hence all in the first block.
HEAD: Final = 128
#: A place takes whole pages for itself, so smaller classes would save nothing.
FLOOR: Final = PAGE
_TORCH: Final = {dtype: kind for kind, dtype in device.DTYPES.items()}


class ShapesDiffer(Exception):
    """Another rank brought a tensor of another shape to the same place."""


def tells_apart(ranks: int, dtype: DType) -> bool:
    """Whether heads of ``dtype`` tell the shapes of so many ranks apart: the ones of 256 add up to no uint8."""
    return ranks < 1 << 8 * dtype.itemsize


def class_of(elements: int, dtype: DType) -> int:
    """Elements of the place for tensors of ``elements``, head included: four classes an octave, so that but for small
    ones less than a fifth of a place is zeros."""
    nbytes = max((HEAD + elements) * dtype.itemsize, FLOOR)
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step // dtype.itemsize


@lru_cache(1024)
def _head(shape: tuple[int, ...], dtype: DType) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """Its bytes, and which of its elements are zeros."""
    digest = np.frombuffer(xxhash.xxh3_64_digest(repr(shape).encode()), np.uint8)
    bits = np.unpackbits(digest)
    elements = torch.from_numpy(np.stack([bits, 1 - bits], 1).ravel()).to(_TORCH[dtype])
    return elements.view(torch.uint8).numpy(), elements.eq(0).numpy()


class Fitted:
    """The memory of a tensor as a shared place takes it; see :class:`gcclient.device.Memory`."""

    __slots__ = ("_dtype", "_end", "_head", "_inner", "_start", "_zeros")

    def __init__(self, inner: device.Memory, spec: TensorSpec) -> None:
        self._inner = inner
        self._dtype = DType(spec.dtype)
        self._head, self._zeros = _head(spec.shape, self._dtype)
        self._start = self._head.nbytes
        self._end = self._start + spec.elements * self._dtype.itemsize

    def load(self, lo: int, hi: int, target: Bytes) -> None:
        if lo == 0:
            target[: self._start] = self._head
        a, b = max(lo, self._start), min(hi, self._end)
        if a < b:
            self._inner.load(a - self._start, b - self._start, target[a - lo : b - lo])
        target[max(self._end - lo, 0) :] = 0

    def store(self, lo: int, hi: int, source: Bytes) -> None:
        """Raises :class:`ShapesDiffer` from the first block."""
        if lo == 0:
            found = source[: self._start].reshape(HEAD, self._dtype.itemsize).any(1)
            if (found & self._zeros).any():
                raise ShapesDiffer
        a, b = max(lo, self._start), min(hi, self._end)
        if a < b:
            self._inner.store(a - self._start, b - self._start, source[a - lo : b - lo])

    def queued(self) -> Wait | None:
        return self._inner.queued()

    def settle(self) -> None:
        self._inner.settle()


def contradict(session: Session, domain: Domain, spec: TensorSpec) -> None:
    """Other ranks brought another shape than ``spec``: let the daemons compare what each of them declares it to be, and
    end the job with both. There will be no such section, since not all declare it alike."""
    session.inform(DeclareSection(domain.id, Section(len(domain.sections), (spec,)), domain.step + 1))


def await_verdict(session: Session, domain: Domain, spec: TensorSpec) -> GradcommError:
    """:func:`contradict`, and what the job ended with. Ranks that do not fetch their result say nothing: then it ends
    with what is known here."""
    if session.failure is None:
        contradict(session, domain, spec)
    try:
        session.wait_for(lambda: session.failure is not None, f"what others brought as {spec.name!r}", "declare", GRACE)
    except StepTimeout:
        session.fail(_mine(session, spec))
    assert session.failure is not None
    return session.failure.again()


def _mine(session: Session, spec: TensorSpec) -> TensorMismatch:
    return TensorMismatch(
        f"rank {session.me.rank} brought {spec.describe()}, and another rank a tensor of another shape",
        job=session.label,
        phase="push",
        advice="let every rank make the same calls, with tensors of the same shapes, in the same order",
    )
