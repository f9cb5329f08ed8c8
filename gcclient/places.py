"""Where tensors that are pushed one by one live in shared memory.

What may live here: a declared tensor, the places that unnamed ones take turns in, pushing all of a tensor's blocks as
a step of their own, what all such pushes have in common. What may not: results (`calls.py`, `collectives.py`), names.
"""

from __future__ import annotations

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
from gcproto.dtypes import DType
from gcproto.manifest import TensorSpec

#: Unnamed tensors of one shape and dtype take turns in this many places, fewer if they are large: places are
#: shared memory, and two suffice to copy one result while the next is exchanged.
PLACES: Final = 8
_PLACES_BYTES: Final = 8 << 20


def places_for(nbytes: int) -> int:
    """The number of places for unnamed tensors of ``nbytes`` bytes each; the same on every rank."""
    return max(2, min(PLACES, _PLACES_BYTES // max(nbytes, 1)))


class UnderWay(ABC):
    """A push of one tensor. ``over``: its result was fetched, or it has none; ``step``: its number, once pushed."""

    __slots__ = ("session", "tensor", "step", "over")

    #: what messages call it, and what its caller may do should it be given up
    kind: ClassVar[str]
    again: ClassVar[str]

    def __init__(self, session: Session, tensor: Tensor) -> None:
        self.session = session
        self.tensor = tensor
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
        self.session.wait_result(ready, f"{self.kind} of {self.tensor.spec.describe()}", self.step, began)

    def _end(self, copied: bool = True) -> None:
        """It is over. Once its result is ``copied`` too, and not only queued on a device, its places are free, and keep
        none of the caller's memory."""
        self.session.pending.discard(self)
        if copied and self.tensor.call is self:
            self.tensor.call = None
        self.over = True  # last: from now on another push may be the tensor's

    def _given_up(self) -> StepSkipped:
        return StepSkipped(
            f"{self.kind} of {self.tensor.spec.describe()} was given up with a lost node",
            job=self.session.label,
            step=self.step,
            phase="exchange",
            advice=f"{self.again} if it is still wanted: all ranks that are left get this",
        )


class Tensor:
    """A declared tensor: its blocks, and what is under way with it."""

    __slots__ = ("spec", "index", "places", "call", "resident")

    def __init__(self, spec: TensorSpec, index: int, places: list[BlockPlace]) -> None:
        self.spec = spec
        self.index = index
        self.places = places
        self.call: UnderWay | None = None
        #: the tensor that lives in the input slots, if there is one
        self.resident: torch.Tensor | None = None

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


def declare(session: Session, domain: Domain, spec: TensorSpec) -> Tensor:
    """Declare a tensor as a section of its own. All ranks together."""
    index = len(domain.sections)
    places = session.declare(domain, (spec,))
    return Tensor(spec, places[0].block.section if places else index, places)


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
    """Places of unnamed tensors of one shape and dtype, and how many pushes there were."""

    places: list[Tensor] = field(default_factory=list)
    starts: int = 0


class Places:
    """The places of unnamed tensors in one domain, called ``<prefix>N`` with N in program order.

    ``domain``: asked for when it is first needed, since all ranks declare it together.
    """

    def __init__(self, session: Session, domain: Callable[[], Domain], prefix: str) -> None:
        self.session = session
        self._domain = domain
        self._prefix = prefix
        self._turns: dict[tuple[tuple[int, ...], DType], _Turns] = {}
        self._count = 0
        session.admission.hear.append(self._begin_turns)

    def _begin_turns(self) -> None:
        """Who came in counts its unnamed pushes from none: so do all."""
        for same in self._turns.values():
            same.starts = 0

    def come_into(self) -> None:
        """Find the places that there were before this worker came in."""
        domain = self._domain()
        for index in list(domain.found):
            (spec,) = domain.sections[index].section.tensors
            if spec.name.startswith(self._prefix):
                same = self._turns.setdefault((spec.shape, DType(spec.dtype)), _Turns())
                same.places.append(declare(self.session, domain, spec))
                self._count += 1

    def find(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The next place in turn.

        Turns go by the number of pushes alone: which calls are over differs between ranks that poll.
        """
        same = self._turns.setdefault((shape, dtype), _Turns())
        turn = same.starts % places_for(math.prod(shape) * dtype.itemsize)
        if turn == len(same.places):
            spec = TensorSpec(f"{self._prefix}{self._count}", shape, int(dtype))
            self._count += 1
            same.places.append(declare(self.session, self._domain(), spec))
        same.starts += 1
        return same.places[turn]
