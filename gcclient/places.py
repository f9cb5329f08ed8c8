"""Where tensors that are pushed one by one live in shared memory.

What may live here: a declared tensor, the places that unnamed ones take turns in, pushing all of a tensor's blocks as
a step of their own, what all such pushes have in common. What may not: results (`calls.py`, `collectives.py`), names,
what is in places that several shapes share (`size_classes.py`).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.domain import Domain, Step
from gcclient.errors import GradcommError, StepSkipped
from gcclient.session import Session
from gcclient.size_classes import Fitted, class_of, tells_apart
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec

log = logging.getLogger("gcclient")

#: Unnamed tensors of one shape and dtype take turns in this many places, fewer if they are large: places are
#: shared memory, and two suffice to copy one result while the next is exchanged.
PLACES: Final = 8
_PLACES_BYTES: Final = 8 << 20
#: So many shapes have places of their own, fewer once these hold more bytes than that; the first few have them whatever
#: they hold, as buckets of DDP are few and large. All later ones share places with others of their size, since memory
#: that a shape has taken is taken for the rest of the job.
SHAPES: Final = 64
FEW_SHAPES: Final = 16
_OWN_BYTES: Final = 256 << 20
#: in the name of a place that shapes share
_SHARED: Final = "any."


def places_for(nbytes: int) -> int:
    """The number of places for unnamed tensors of ``nbytes`` bytes each; the same on every rank."""
    return max(2, min(PLACES, _PLACES_BYTES // max(nbytes, 1)))


class UnderWay(ABC):
    """A push of one tensor. ``spec``: what it is, also where ``tensor`` is a place that shapes share; ``over``: its
    result was fetched, or it has none; ``step``: its number, once pushed."""

    __slots__ = ("session", "tensor", "spec", "step", "over")

    #: what messages call it, and what its caller may do should it be given up
    kind: ClassVar[str]
    again: ClassVar[str]

    def __init__(self, session: Session, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.session = session
        self.tensor = tensor
        self.spec = tensor.spec if tensor.shared is None else tensor.spec_of(shape)
        self.step = 0
        self.over = False

    @abstractmethod
    def deliver(self, places: list[BlockPlace]) -> None:
        """Results are in the output slots of these places."""

    @abstractmethod
    def fail(self, error: GradcommError) -> None:
        """See :class:`gcclient.waiters.Pending`."""

    @abstractmethod
    def finish(self) -> object:
        """Wait for the result and copy it out. Raises :class:`StepSkipped` and the job's failure."""

    def _wait(self, ready: Callable[[], bool], began: float) -> None:
        """See :meth:`gcclient.session.Session.wait_result`."""
        self.session.wait_result(ready, f"{self.kind} of {self.spec.describe()}", self.step, began)

    def _end(self, copied: bool = True) -> None:
        """It is over. Once its result is ``copied`` too, and not only queued on a device, its places are free, and keep
        none of the caller's memory."""
        self.session.pending.discard(self)
        if copied and self.tensor.call is self:
            self.tensor.call = None
        self.over = True  # last: from now on another push may be the tensor's

    def _given_up(self) -> StepSkipped:
        return StepSkipped(
            f"{self.kind} of {self.spec.describe()} was given up with a lost node",
            job=self.session.label,
            step=self.step,
            phase="exchange",
            advice=f"{self.again} if it is still wanted: all ranks that are left get this",
        )


class Tensor:
    """A declared tensor: its blocks, and what is under way with it. ``shared``: the domain of a place for tensors of
    several shapes."""

    __slots__ = ("spec", "index", "places", "call", "resident", "shared")

    def __init__(self, spec: TensorSpec, index: int, places: list[BlockPlace], shared: Domain | None = None) -> None:
        self.spec = spec
        self.index = index
        self.places = places
        self.shared = shared
        self.call: UnderWay | None = None
        #: the tensor that lives in the input slots, if there is one
        self.resident: torch.Tensor | None = None

    def spec_of(self, shape: tuple[int, ...]) -> TensorSpec:
        """What a tensor of ``shape`` in this place is."""
        return TensorSpec(self.spec.name, shape, self.spec.dtype)

    def memory(self, spec: TensorSpec, memory: device.Memory) -> device.Memory:
        """``memory`` of a tensor that is ``spec``, as its places take it."""
        return memory if self.shared is None else Fitted(memory, spec)

    def vacate(self) -> None:
        """Until its places can be used again. Raises the job's failure.

        That what was under way was given up is for whoever waits for it, and not raised here: ranks wait for it at
        different moments, and all must push next what they push.
        """
        if (call := self.call) is not None:
            try:
                call.finish()
            except Exception:
                if not call.over:
                    raise


def declare(session: Session, domain: Domain, spec: TensorSpec, shared: bool = False) -> Tensor:
    """Declare a tensor as a section of its own, or a place that shapes share. All ranks together."""
    index = len(domain.sections)
    places = session.declare(domain, (spec,))
    return Tensor(spec, places[0].block.section if places else index, places, domain if shared else None)


def fill(step: Step, tensor: Tensor, op: UnderWay, memory: device.Memory) -> None:
    """Copy ``memory`` into a tensor's places and add them to ``step``; ``op`` gets their results."""
    # Highest addresses first, as lanes send them.
    for place in reversed(tensor.places):
        at = place.block.start * place.block.dtype.itemsize
        place.op = op
        memory.load(at, at + place.block.nbytes, place.input)
        step.add(place)


def push(domain: Domain, tensor: Tensor, op: UnderWay, memory: device.Memory, flags: int) -> int:
    """Copy ``memory`` in and push it, as a step of ``domain`` whose results ``op`` gets. Returns the step's number."""
    with domain.pushing:
        step = Step(domain, flags, 1.0, memory.queued)
        fill(step, tensor, op, memory)
        step.close()
        return step.number


@dataclass(slots=True)
class _Turns:
    """Places of unnamed tensors of one shape, or one size class, and dtype, and how many pushes there were."""

    shape: tuple[int, ...]
    dtype: DType
    shared: bool = False
    places: list[Tensor] = field(default_factory=list)
    starts: int = 0

    @property
    def wanted(self) -> int:
        """How many places there will be."""
        return places_for(math.prod(self.shape) * self.dtype.itemsize)


class Places:
    """The places of unnamed tensors in one domain, called ``<prefix>N`` or ``<prefix>any.N`` with N in program order.

    ``domain``: asked for when it is first needed, since all ranks declare it together. What a call gets goes by the
    calls before it alone, so that all ranks find the same.
    """

    def __init__(self, session: Session, domain: Callable[[], Domain], prefix: str) -> None:
        self.session = session
        self._domain = domain
        self._prefix = prefix
        self._own: dict[tuple[tuple[int, ...], DType], _Turns] = {}
        self._own_bytes = 0
        #: by the elements of the place
        self._shared: dict[tuple[int, DType], _Turns] = {}
        self._count = 0
        session.admission.hear.append(self._begin_turns)

    def _begin_turns(self) -> None:
        """Who came in counts its unnamed pushes from none: so do all."""
        for same in (*self._own.values(), *self._shared.values()):
            same.starts = 0

    def come_into(self) -> None:
        """Find the places that there were before this worker came in."""
        domain = self._domain()
        for index in list(domain.found):
            (spec,) = domain.sections[index].section.tensors
            if spec.name.startswith(self._prefix):
                dtype, shared = DType(spec.dtype), spec.name.startswith(self._prefix + _SHARED)
                same = self._of_class(spec.elements, dtype) if shared else self._of_shape(spec.shape, dtype)
                same.places.append(declare(self.session, domain, spec, shared))
                self._count += 1

    def find(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The next place in turn.

        Turns go by the number of pushes alone: which calls are over differs between ranks that poll.
        """
        if (shape, dtype) in self._own or self._roomy() or not tells_apart(self.session.me.size, dtype):
            same = self._of_shape(shape, dtype)
        else:
            same = self._of_class(class_of(math.prod(shape), dtype), dtype)
        turn = same.starts % same.wanted
        if turn == len(same.places):
            kind = _SHARED if same.shared else ""
            spec = TensorSpec(f"{self._prefix}{kind}{self._count}", same.shape, int(dtype))
            self._count += 1
            same.places.append(declare(self.session, self._domain(), spec, same.shared))
        same.starts += 1
        return same.places[turn]

    def _roomy(self) -> bool:
        """Whether another shape is to have places of its own."""
        return len(self._own) < (SHAPES if self._own_bytes < _OWN_BYTES else FEW_SHAPES)

    def _of_shape(self, shape: tuple[int, ...], dtype: DType) -> _Turns:
        if (shape, dtype) not in self._own:
            made = self._own[shape, dtype] = _Turns(shape, dtype)
            self._own_bytes += made.wanted * math.prod(shape) * dtype.itemsize
        return self._own[shape, dtype]

    def _of_class(self, elements: int, dtype: DType) -> _Turns:
        if not self._shared:
            log.info(
                "job %s: unnamed tensors had %d shapes; those of others share memory by size from now on, and up to a "
                "fifth of what is sent of them is zeros",
                self.session.label,
                len(self._own),
            )
        return self._shared.setdefault((elements, dtype), _Turns((elements,), dtype, True))
