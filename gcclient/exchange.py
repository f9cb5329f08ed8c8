"""One optimizer step's gradients: brought as they become ready, averaged or summed, written back.

What may live here: what goes into a step and what becomes of its results. What may not: when a step begins and ends
(`optimizer.py`), where gradients live (`parameters.py`).

All ranks push the same blocks, also where a parameter has no gradient on some of them. So each says, with a small
tensor of its own in the same step, for which parameters it has one. A rank that lacks some waits for the average of
that before it pushes what it has nothing to bring to: zeros where another rank has a gradient, nothing at all where
none has. What nobody pushes keeps its residual.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.device import Memory
from gcclient.domain import Domain
from gcclient.errors import GradcommError
from gcclient.gradients import Brought, check_unchanged, read_gradient
from gcclient.parameters import Parameter, Piece, declare_tensor
from gcclient.scope import Scope
from gcclient.session import Session
from gcclient.timing import Timing
from gcproto.manifest import USED


class Layout:
    """What does not change from step to step: the parameters, and which of them each block holds."""

    def __init__(self, session: Session, domain: Domain, parameters: list[Parameter], average: bool) -> None:
        self.session = session
        self.average = average
        self.domain = domain
        self.parameters = tuple(parameters)
        used = torch.zeros(len(parameters), dtype=torch.float64, device=device.HOST)
        self.used = declare_tensor(session, domain, USED, used)
        self.timing = Timing(domain.id, session)
        self.by_block: dict[BlockPlace, list[tuple[Parameter, Piece]]] = {}
        for parameter in parameters:
            for piece in parameter.pieces:
                self.by_block.setdefault(piece.place, []).append((parameter, piece))

    def begin(self, scale: float) -> Exchange:
        """Begin a step; ``scale``: the loss scale of its gradients."""
        return Exchange(self, scale)


class Target:
    """Where an average goes. Made when it is wanted: until then work queued on a device may read the gradient."""

    __slots__ = ("_flat", "_grad", "memory")

    def __init__(self, grad: torch.Tensor, flat: torch.Tensor) -> None:
        self._grad, self._flat = grad, flat
        self.memory: Memory = device.memory_of(flat)

    def complete(self) -> None:
        """All of it was stored."""
        self.memory.settle()
        device.put_back(self._flat, self._grad)


class Exchange(Scope):
    """The open step of a layout's domain. :meth:`bring` gradients, in any order; then :meth:`finish`."""

    def __init__(self, layout: Layout, scale: float) -> None:
        super().__init__(layout.session, layout.domain, scale, layout.average)
        self.layout = layout
        self.brought: dict[Parameter, Brought] = {}
        self._arrived: deque[BlockPlace] = deque()
        self._error: GradcommError | None = None
        self.session.pending.add(self)

    # --------------------------------------------------------------------------------------- pushing
    def bring(self, parameter: Parameter) -> None:
        """Copy in a parameter's gradient and push what is complete with it.

        Raises ValueError for a gradient of another dtype or size than its parameter.
        """
        brought = read_gradient(parameter)
        flat = brought.flat
        began = self.layout.timing.clock()
        self.brought[parameter] = brought
        memory = device.memory_of(flat)
        self.fill(parameter.pieces, memory)
        self.layout.timing.settle(memory)
        self.session.counters.bytes_pushed += flat.nbytes
        complete = len(self.brought) == len(self.layout.parameters)
        if complete:
            self._say_used()
            self.step.close()
        else:
            self.step.flush()
        self.layout.timing.copied(flat.nbytes, began)
        if complete:
            self.layout.timing.closed(self.step.number)

    def _say_used(self) -> None:
        brought = [p in self.brought for p in self.layout.parameters]
        used = torch.tensor(brought, dtype=torch.float64, device=device.HOST)
        self.fill(self.layout.used.pieces, device.memory_of(used))

    def _fill_up(self, absent: list[Parameter], began: float) -> list[bool]:
        """Push what has no gradient here as far as any rank has one; returns which of ``absent`` some rank has."""
        for parameter in absent:
            self.fill((piece for piece in parameter.pieces if piece.unit.scope is self), None)
        self._say_used()
        self.step.flush()
        pieces = [piece for parameter in absent for piece in parameter.pieces if piece.unit.scope is not self]
        if self.session.job.commits:
            # No result comes before the step is closed and held by all: who lacks something brings zeros.
            self.fill(pieces, None)
            self.step.close()
            self.layout.timing.closed(self.step.number)
            return self._used(absent, began)
        used = self._used(absent, began)
        wanted = {x.unit for parameter, some in zip(absent, used, strict=True) if some for x in parameter.pieces}
        self.fill((piece for piece in pieces if piece.unit in wanted), None)
        self.step.close()
        self.layout.timing.closed(self.step.number)
        return used

    def _used(self, absent: list[Parameter], began: float) -> list[bool]:
        """Which of ``absent`` some rank has a gradient for, once that is averaged."""
        said = self.layout.used.pieces
        self._wait(lambda: all(piece.place.done for piece in said), began)
        shares = dict(
            zip(self.layout.parameters, np.concatenate([p.output.view(np.float64) for p in said]), strict=True)
        )
        return [bool(shares[parameter] > 0) for parameter in absent]

    # --------------------------------------------------------------------------------------- results
    def take(self, place: BlockPlace) -> None:
        self._arrived.append(place)

    def fail(self, error: GradcommError) -> None:
        self._error = error

    def _wait(self, ready: Callable[[], object], began: float) -> None:
        label = self.domain.declared.label
        self.session.wait_result(lambda: bool(ready()) or self._error is not None, label, self.step.number, began)
        if not ready() and self._error is not None:
            raise self._error.again()

    @property
    def absent(self) -> list[Parameter]:
        """The parameters without a gradient here."""
        return [p for p in self.layout.parameters if p not in self.brought]

    def targets(self) -> dict[Parameter, Target]:
        """Where the averages of what was brought go."""
        return {parameter: Target(b.grad, b.flat) for parameter, b in self.brought.items()}

    def wait(self, began: float) -> list[BlockPlace]:
        """Blocks whose results have come since the last call, some at least. Raises the job's failure."""
        self._wait(lambda: self._arrived, began)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def over(self, waited: float) -> None:
        """All results were taken, for which somebody has waited so many seconds."""
        counters = self.session.counters
        counters.steps += 1
        self.layout.timing.back(self.step.number)
        counters.bytes_pulled += sum(b.flat.nbytes for b in self.brought.values())
        counters.wait_seconds += waited
        self.session.pending.discard(self)
        # Blocks remember their newest step until the next one: it must not keep the gradients.
        self.brought = {}

    def finish(self) -> None:
        """Push what is left, wait for all results, and write each average to its parameter's gradient.

        A parameter without a gradient here gets one if another rank had it, or if its residual was delivered. Raises
        RuntimeError if a gradient was changed after it was brought, and the job's failure.
        """
        began, tracing = time.monotonic(), self.session.tracing
        check_unchanged(self.brought)
        absent = self.absent
        used = self._fill_up(absent, began) if absent else []
        targets = self.targets()
        taken = 0
        while taken < self.sent:
            for place in self.wait(began):
                copying = tracing.now() if tracing.on else 0.0
                for parameter, piece in self.layout.by_block.get(place, ()):
                    if parameter in targets:
                        targets[parameter].memory.store(piece.lo, piece.hi, piece.output)
                if copying:
                    tracing.pulled(place, copying)
                taken += 1
        for target in targets.values():
            target.complete()
        for parameter, some in zip(absent, used, strict=True):
            self._give(parameter, some)
        self.over(time.monotonic() - began)

    def _give(self, parameter: Parameter, used: bool) -> None:
        """Make a gradient for a parameter that has none here, alike on all ranks that have none."""
        pieces = [piece for piece in parameter.pieces if piece.unit.scope is self]
        if not used and not any(piece.output.any() for piece in pieces):
            return
        grad = torch.zeros_like(parameter.tensor, memory_format=torch.contiguous_format, requires_grad=False)
        target = Target(grad, grad.view(-1))
        for piece in pieces:
            target.memory.store(piece.lo, piece.hi, piece.output)
        target.complete()
        parameter.tensor.grad = grad
