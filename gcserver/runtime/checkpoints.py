"""States of blocks on their way to and from workers: a lane's part of a checkpoint.

What may live here: answering `AskStates` and `GiveStates`, and what of them has to wait. What may not: where states are
(`blocks.py`), what they mean to the protocol (`gcserver.core`), connections (`laneworkers.py`).

A question waits until its block is there and its step is settled, and an answer until the worker has read what it was
sent before: there is one of either for each worker, of at most a mebibyte, and who asks on meanwhile is sent away.
What a worker brings is believed as far as it can be: whose block it is, how long it is and that it is finite numbers
is looked at; the numbers are its own job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from gcproto.messages import Fault
from gcproto.states import PIECE, AskStates, BlockStates, GiveStates, StatesKept, most_floats
from gcserver.core import events as ev
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime import refusals, shortage
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.lanelink import LaneTrouble

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess

Question = AskStates | GiveStates
FLOAT: Final = 4


class Unfit(Exception):
    """What no gcclient says. ``why`` is what whoever said it is told."""

    def __init__(self, job: bytes, what: str) -> None:
        super().__init__(what)
        self.why: Fault = refusals.out_of_order(job, what)


class Checkpoints:
    """Questions of one lane's workers."""

    def __init__(self, process: LaneProcess) -> None:
        self._p = process

    def answer(self, job: bytes, rank: int, question: Question) -> BlockStates | StatesKept | None:
        """The answer to a worker; None while there is none yet. Raises Unfit.

        Where memory is short the job ends, and there is never one.
        """
        domain = (job, question.domain)
        memory, machine = self._p.executor.domains.get(domain), self._p.machine.domains.get(domain)
        if memory is None or machine is None or question.key not in memory.blocks:
            return None
        if rank not in memory.config.ranks:
            raise Unfit(job, f"it asks for states of a process group that rank {rank} is not in")
        if isinstance(question, AskStates):
            return self._states(memory, question) if machine.steps.settled >= question.step else None
        self._check(job, rank, memory, question)
        if machine.partitions[question.key].begun:
            raise Unfit(job, f"it brings states of block {question.key} after that was first exchanged")
        return self._take(job, memory, question)

    def _states(self, memory: DomainMemory, q: AskStates) -> BlockStates:
        found = memory.settled_states(q.key, q.owner)
        if found is None:
            return BlockStates(q.domain, q.key, q.owner, q.first)
        floats, tag, held = found
        data = floats[q.first : q.first + PIECE].tobytes()
        return BlockStates(q.domain, q.key, q.owner, q.first, len(floats), tag, held, data)

    def _check(self, job: bytes, rank: int, memory: DomainMemory, q: GiveStates) -> None:
        """Raises Unfit."""
        block = memory.blocks[q.key].block
        least, most = block.elements, most_floats(block.elements, len(block.bounds) - 1)
        count = len(q.data) // FLOAT
        if rank != memory.config.ranks[0]:
            raise Unfit(job, f"rank {rank} brings states; those of a node are brought by its first rank there")
        if q.owner and block.owner != memory.config.me:
            raise Unfit(job, f"it brings the owner's states of block {q.key}, which another node owns")
        if block.dtype not in COMPRESSIBLE:
            raise Unfit(job, f"it brings states of block {q.key}, which is never compressed")
        if not least <= q.floats <= most:
            raise Unfit(job, f"it brings {q.floats} floats of block {q.key}, expected {least} to {most}")
        if len(q.data) % FLOAT or not count or q.first + count > q.floats:
            raise Unfit(job, f"it brings {len(q.data)} bytes from float {q.first} on of {q.floats}")
        if not np.isfinite(np.frombuffer(q.data, np.float32)).all():
            raise Unfit(job, f"what it brings of block {q.key} is not finite")

    def _take(self, job: bytes, memory: DomainMemory, q: GiveStates) -> StatesKept | None:
        values = np.frombuffer(q.data, np.float32)
        try:
            if not memory.give_states(q.key, q.owner, q.floats, q.first, values):
                raise Unfit(job, f"it brings {q.floats} floats of block {q.key}, and has brought another number before")
        except OSError as error:
            kind, advice = shortage.kind_of(error)
            text = f"states of a checkpoint cannot be taken: {shortage.text_of(error)}"
            self._p.send_up(LaneTrouble(job, kind, text, advice))
            return None
        if q.first + len(values) == q.floats:
            memory.keep_given(q.key, q.owner, q.tag, q.held)
            if q.held:
                self._p.feed(ev.StatesTaken(memory.config.id, q.key, q.owner))
        return StatesKept(q.domain, q.key, q.owner, q.first)
