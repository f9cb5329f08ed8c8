"""An open step whose blocks fill up as gradients come: what training with DDP and with the optimizer wrapper share.

What may live here: copying pieces into blocks, pushing what is complete, counting what came back. What may not: where
pieces are (`parameters.py`), who gets the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from gcclient.arena import BlockPlace
from gcclient.bell import Wait, all_of
from gcclient.device import Memory
from gcclient.domain import Domain, Step
from gcclient.parameters import Piece, Unit
from gcclient.session import Session
from gcproto.wire import Flag


class Scope(ABC):
    """One step of a domain, which averages or sums. Subclasses say what becomes of results: :meth:`take`.

    ``sent``: how many of its blocks were pushed or will be, ``back``: how many of them have come back.
    """

    def __init__(self, session: Session, domain: Domain, scale: float, average: bool = True) -> None:
        self.session = session
        self.domain = domain
        self.step = Step(domain, int(Flag.AVERAGE) if average else 0, scale, self._queued)
        self.units: list[Unit] = []
        self.sent = 0
        self.back = 0
        self.nonfinite = False
        #: the step was given up with a lost node: its results are zeros
        self.skipped = False
        self._loading: list[Memory] = []

    def fill(self, pieces: Iterable[Piece], memory: Memory | None) -> None:
        """Copy in what the pieces bring (zeros without ``memory``), and push the units that are complete with it."""
        for piece in pieces:
            unit = piece.unit
            if unit.scope is not self:
                self._open(unit)
            if memory is None:
                piece.input[:] = 0
            else:
                memory.load(piece.lo, piece.hi, piece.input)
                # Again where the piece before was rung for: only what was queued by then is waited for with it.
                if not self._loading or self._loading[-1] is not memory:
                    self._loading.append(memory)
            unit.filled += piece.hi - piece.lo
            if unit.filled == unit.nbytes:
                self.push(unit)

    def _open(self, unit: Unit) -> None:
        unit.scope, unit.filled = self, 0
        self.units.append(unit)
        self.sent += len(unit.places)
        for place in unit.places:
            place.op = self

    def push(self, unit: Unit) -> None:
        for place in unit.places:
            self.step.add(place)

    def _queued(self) -> Wait | None:
        """How to wait until whatever was copied in is really there."""
        loading, self._loading = self._loading, []
        return all_of(memory.queued() for memory in loading)

    def deliver(self, places: list[BlockPlace]) -> None:
        """Results arrived; called by the reading thread."""
        for place in places:
            if place.nonfinite and not self.nonfinite:
                self.nonfinite = True
                self.session.counters.nonfinite_steps += 1
            if place.skipped and not self.skipped:
                self.skipped = True
                self.session.counters.skipped_steps += 1
            self.take(place)
        self.back += len(places)

    @abstractmethod
    def take(self, place: BlockPlace) -> None:
        """The result of a block is in its output slot."""
