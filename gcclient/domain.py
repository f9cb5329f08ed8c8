"""One domain as a worker sees it: its layout, its steps, its doorbells.

What may live here: the address space and arenas of a domain, numbering and closing of steps, which doorbells
must be rung again after a restart. What may not: sockets (`daemon.py`), tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gcclient.arena import BlockPlace, LaneArena
from gcclient.bell import Bell, Wait
from gcclient.tracing import Tracing
from gcproto.epoch_messages import DomainFacts
from gcproto.lane_messages import Done, MapSection, Push
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Registered
from gcproto.packed import Message
from gcproto.wire import Flag

#: Doorbells of this many steps are kept after their results came, for scoped and other domains. A lane that is
#: restarted has forgotten who closed a step that is not settled; step s has results only once step s - lag is
#: settled, so this must not be less than the lags in gcserver.core.job (a test compares them).
KEEP_SCOPED: Final = 2
KEEP_CALLS: Final = 256
#: Ring as soon as this many bytes are in the arena, so that transfer overlaps with copying the rest.
RING_BYTES: Final = 1 << 20
#: sends on a lane's link after calling what records that, under the link's lock
Post = Callable[[int, Callable[[], None], Message], None]


class Domain:
    """Layout, steps and doorbells of one domain.

    ``post(lane, record, message)``: see Post. ``pushing`` serialises pushes: steps are numbered in program order.
    ``bell``: the session's.
    """

    def __init__(
        self,
        declared: DeclareDomain,
        members: int,
        local_ranks: int,
        index: int,
        lanes: int,
        partition_bytes: int,
        post: Post,
        bell: Bell,
    ) -> None:
        self.declared = declared
        self.id = declared.domain
        #: the domain that has the gradients of the model that is declared in this one: another one where this rank has
        #: a shard of them, -1 where it has none
        self.gradients = declared.domain
        #: its ranks on each of its nodes, and which of those this one is
        self.nodes: tuple[tuple[int, ...], ...] = ()
        self.me = 0
        self.lanes = lanes
        self.space = AddressSpace(members, lanes, partition_bytes, declared.whole)
        self.arenas = [LaneArena(local_ranks, index) for _ in range(lanes)]
        self.blocks: dict[int, BlockPlace] = {}
        self.sections: list[DeclareSection] = []
        self.agreed = 0
        self.step = 0
        #: the newest step that was told to be over
        self.closed = 0
        self.newest_done = 0
        self.pushing = threading.RLock()
        self.journal: list[deque[Push]] = [deque() for _ in range(lanes)]
        #: sections that were agreed before this worker came in, and that it has not asked for yet
        self.found: list[int] = []
        #: the request each lane has not answered yet
        self.maps: list[MapSection | None] = [None] * lanes
        #: and what it was asked, or brought, of states and has not answered yet
        self.questions: list[Message | None] = [None] * lanes
        #: records what is done here, if anything does
        self.tracing = Tracing()
        self._keep = KEEP_SCOPED if declared.scoped else KEEP_CALLS
        self._post = post
        self._bell = bell

    @classmethod
    def in_job(cls, declared: DeclareDomain, job: Registered, me: int, post: Post, bell: Bell) -> Domain:
        """A domain of a job, for rank ``me``, laid out over the nodes of the job's first epoch."""
        hosts = [m for m in job.members if any(r in declared.ranks for r in m.ranks)]
        mine = next(m for m in hosts if me in m.ranks)
        local = sorted(r for r in mine.ranks if r in declared.ranks)
        lanes = len(job.lane_sockets)
        made = cls(declared, len(hosts), len(local), local.index(me), lanes, job.partition_bytes, post, bell)
        made.nodes = tuple(tuple(r for r in m.ranks if r in declared.ranks) for m in hosts)
        made.me = hosts.index(mine)
        return made

    # --------------------------------------------------------------------------------------- layout
    def lay_out(self, section: Section) -> None:
        """Give an agreed section its addresses and ask the lanes that got blocks for chunks.

        Also where no chunk is new: the answer says that the lane has prepared the slots.
        """
        blocks = self.space.append(section)
        for lane, arena in enumerate(self.arenas):
            mine = [b for b in blocks if b.lane == lane]
            arena.plan.append(mine)
            if mine:
                self._ask(lane, MapSection(self.id, section.index, len(arena.maps)))

    def question(self, lane: int, asked: Message) -> None:
        """Ask a lane for states, or bring some; again should it be a new process before it answers."""

        def record() -> None:
            self.questions[lane] = asked

        self._post(lane, record, asked)

    def _ask(self, lane: int, request: MapSection) -> None:
        def record() -> None:
            self.maps[lane] = request

        self._post(lane, record, request)

    def come_into(self, facts: DomainFacts) -> None:
        """A domain that was there before this worker: its sections lie where they lie for all others, and its next step
        is theirs."""
        self.step = self.closed = self.newest_done = facts.settled
        for section in facts.sections:
            self.sections.append(DeclareSection(self.id, section))
            self.found.append(section.index)
            blocks = self.space.append(section)
            for lane, arena in enumerate(self.arenas):
                arena.plan.append([b for b in blocks if b.lane == lane])
        self.agreed = len(self.sections)
        for lane, arena in enumerate(self.arenas):
            if arena.plan.chunks:
                self._ask(lane, MapSection(self.id, len(self.sections) - 1, 0))

    def take_found(self, tensors: tuple[TensorSpec, ...], cuts: tuple[int, ...]) -> int | None:
        """The index of a section like this one that was agreed before this worker came in; None if there is none."""
        for index in self.found:
            section = self.sections[index].section
            if section.tensors == tensors and section.cuts == cuts:
                self.found.remove(index)
                return index
        return None

    @property
    def mapped(self) -> bool:
        return all(request is None for request in self.maps)

    def take_up(self, index: int) -> list[BlockPlace]:
        """The places of a mapped section's blocks, in address order."""
        places = []
        for block in self.space.blocks[index]:
            place = self.arenas[block.lane].place(block)
            # A lane numbers rounds by steps: one that is there already belongs to this very process.
            self.blocks[block.key] = place
            places.append(place)
        return places

    # --------------------------------------------------------------------------------------- pushing
    def ring(self, lane: int, push: Push, places: Sequence[BlockPlace], grad_scale: float, wait: Wait | None) -> None:
        """Commit the inputs of a push's ``places`` (all of ``lane``) and tell the lane, once ``wait`` says that they
        are there."""
        tracing = self.tracing
        began = tracing.now() if tracing.on else 0.0
        for place in places:
            place.expect(push.step)

        def ring() -> None:
            for place in places:
                place.commit(push.step, push.flags, grad_scale)
            self._post(lane, lambda: self._record(lane, push), push)
            if began:
                tracing.pushed(self.id, push.step, places, began)

        self._bell.ring(wait, ring)

    def _record(self, lane: int, push: Push) -> None:
        journal = self.journal[lane]
        horizon = self.newest_done - self._keep
        while journal and journal[0].step <= horizon and self._over(journal[0]):
            journal.popleft()
        journal.append(push)

    def _over(self, push: Push) -> bool:
        """Whether every result of an earlier push was announced."""
        return all(p.done or p.step > push.step for k in push.keys if (p := self.blocks.get(k)) is not None)

    # ------------------------------------------------------------------------------------- receiving
    def on_done(self, message: Done) -> None:
        """Results are in the output slots; repeated and outdated announcements are ignored."""
        self.newest_done = max(self.newest_done, message.step)
        ready = []
        for key in message.keys:
            place = self.blocks.get(key)
            if place is not None and place.step == message.step and not place.done:
                place.nonfinite = message.nonfinite
                place.skipped = message.skipped
                place.epoch = message.epoch
                place.done = True
                if message.skipped:
                    # What training then finds in place of an average; optimizers leave the step out altogether.
                    place.output[:] = 0
                ready.append(place)
        self._deliver(ready)

    def _deliver(self, ready: list[BlockPlace]) -> None:
        if ready:
            # A Done is about one step, and all blocks of a step have the same op.
            ready[0].op.deliver(ready)

    # -------------------------------------------------------------------------------------- restarts
    def to_repeat(self, lane: int) -> list[Message]:
        """What a restarted lane may not know: an unanswered request, and every doorbell still of use."""
        waiting = (self.maps[lane], self.questions[lane])
        return [m for m in waiting if m is not None] + list(self.journal[lane])

    def scan(self, lane: int) -> None:
        """Take results the lane announced to a connection that was lost: headers are the truth."""
        found: dict[int, list[BlockPlace]] = {}
        for place in self.blocks.values():
            if place.block.lane == lane and not place.done:
                step, flags = place.result()
                if step >= place.step:
                    place.nonfinite = bool(flags & Flag.NONFINITE)
                    place.epoch = 0
                    place.done = True
                    found.setdefault(place.step, []).append(place)
        for ready in found.values():
            self._deliver(ready)

    def close(self) -> None:
        self.blocks.clear()
        for arena in self.arenas:
            arena.close()


class Step:
    """An open step: which blocks are ready to be rung for, and whether each lane was told of the end.

    ``queued`` is called before a lane hears of blocks, and says how to wait until their inputs are really in the arena.
    """

    def __init__(self, domain: Domain, flags: int, grad_scale: float, queued: Callable[[], Wait | None]) -> None:
        domain.step += 1
        self.domain = domain
        self.queued = queued
        self.number = domain.step
        self.flags = flags
        self.grad_scale = grad_scale
        self._ready: list[list[BlockPlace]] = [[] for _ in range(domain.lanes)]
        self._bytes = [0] * domain.lanes
        if domain.tracing.on:
            domain.tracing.opened(domain.id)

    def add(self, place: BlockPlace) -> None:
        """The input of ``place`` is complete; rings once enough has come together for its lane."""
        lane, domain = place.block.lane, self.domain
        if domain.tracing.on:
            domain.tracing.ready(domain.id, self.number, place)
        self._ready[lane].append(place)
        self._bytes[lane] += place.block.nbytes
        if self._bytes[lane] > RING_BYTES:
            self._ring(lane, False)

    def flush(self) -> None:
        """Ring for whatever is ready."""
        for lane in range(self.domain.lanes):
            if self._ready[lane]:
                self._ring(lane, False)

    def close(self) -> None:
        """Ring for what is left and tell every lane that no more comes in this step."""
        for lane in range(self.domain.lanes):
            self._ring(lane, True)
        self.domain.closed = self.number

    def _ring(self, lane: int, close: bool) -> None:
        places, self._ready[lane], self._bytes[lane] = self._ready[lane], [], 0
        push = Push(self.domain.id, self.number, tuple(p.block.key for p in places), close, self.flags)
        self.domain.ring(lane, push, places, self.grad_scale, self.queued() if places else None)
