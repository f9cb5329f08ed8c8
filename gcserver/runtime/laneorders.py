"""What a lane's supervisor says to it, carried out.

What may live here: reading the supervisor's socket, opening what it opens, answering what it asks. What may not: events
of the machine and their effects (`lane.py`), which messages there are (`lanelink.py`), memory layout (`blocks.py`).
"""

from __future__ import annotations

import select
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcproto import wire
from gcproto.channel import ChannelClosed
from gcproto.packed import MessageError
from gcproto.records import replace
from gcserver.core import events as ev
from gcserver.core.control_events import OpenSection
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.lanelink import AddPeer, Admit, AskBlocks, BlockFact, BlockFacts, ForgetJob
from gcserver.runtime.recording import AskRecord, RecordSpans
from gcserver.runtime.setup import lane_address
from gcserver.runtime.steptrace import AskTrace, TracedStep

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess


class LaneOrders:
    """Of one lane. ``asked``: questions about blocks that are being answered: request, what is left, what was found."""

    def __init__(self, lane: LaneProcess) -> None:
        self._lane = lane
        self.asked: deque[tuple[int, Iterator[BlockFact], list[BlockFact]]] = deque()

    def answer(self) -> None:
        """One more block of the oldest question: a large model's residuals take longer than frames may wait."""
        request, left, found = self.asked[0]
        block = next(left, None)
        if block is not None:
            found.append(block)
        else:
            self.asked.popleft()
            self._lane.send_up(BlockFacts(request, tuple(found)))

    def serve(self, event: int) -> None:
        """The supervisor's socket is ready, as epoll says; its end is the lane's."""
        lane = self._lane
        try:
            if event & select.EPOLLOUT:
                lane.link.channel.flush()
                if not lane.link.channel.backlog:
                    lane.poller.modify(lane.link.fileno(), select.EPOLLIN)
            if not event & ~select.EPOLLOUT:
                return
            received = lane.link.receive()
        except (ChannelClosed, MessageError):
            lane.running = False
            return
        for message in received:
            self.take(message)

    def take(self, message: Any) -> None:
        """What the supervisor says. A job whose memory cannot be had or used ends by it."""
        try:
            self._carry_out(message)
        except Exception as error:
            self._lane.feed(ev.DomainClosed(self._lane.endings.end(message, error)))

    def _carry_out(self, message: Any) -> None:
        lane = self._lane
        if isinstance(message, AddPeer):
            node = wire.node_id(message.name)
            lane.counters.names[node] = message.name
            lane.transport.open(node, lane_address(message.address, lane.setup.hello.lane))
            lane.feed(ev.PeerAdded(node, message.name))
        elif isinstance(message, Admit):
            lane.transport.admit(message.admitted)
        elif isinstance(message, ev.DomainOpened):
            self._open_domain(message)
        elif isinstance(message, OpenSection):
            self._open_section(message)
        elif isinstance(message, ev.DomainClosed):
            lane.feed(message)
            lane.endings.closed(message.domain)
        elif isinstance(message, ForgetJob):
            lane.workers.drop_job(message.job)
            # A section that was being opened while the supervisor removed the folder has made it anew.
            shutil.rmtree(self._job_directory(message.job), ignore_errors=True)
        elif isinstance(message, AskBlocks):
            self.asked.append((message.request, lane.executor.facts(message.domain, message.gradients), []))
        elif isinstance(message, AskTrace):
            if message.domain in lane.machine.domains:
                lane.tracer.on_ask(message)
            else:  # of a job that is over no step will end
                lane.send_up(TracedStep(message.request, message.domain, 0, ()))
        elif isinstance(message, RecordSpans | AskRecord):
            lane.recording.take(message)
        else:
            lane.feed(message)
            if isinstance(message, ev.Settled):
                lane.workers.answer_all()

    def _job_directory(self, job: bytes) -> Path:
        return Path(self._lane.setup.state) / "jobs" / job.hex()

    def _open_domain(self, e: ev.DomainOpened) -> None:
        c, lane = e.config, self._lane
        before = lane.executor.domains.get(c.id)
        known = before is not None and c.epoch <= before.config.epoch
        if known or lane.endings.concern(e) or not self._job_directory(c.job).exists():
            # Known already; or the job is gone, and its end is on the way.
            return
        if before is not None:
            lane.reports.forget(c.id)
            lane.executor.close(c.id)
        hello = lane.setup.hello
        memory = DomainMemory(c, hello.lanes, hello.lane, self._job_directory(c.job))
        lane.executor.domains[c.id] = memory
        lane.feed(replace(e, finished=memory.finished(e.settled)))
        lane.workers.domain_opened()

    def _open_section(self, e: OpenSection) -> None:
        lane = self._lane
        memory = lane.executor.domains.get(e.domain)
        if memory is None or e.section.index < len(memory.space.sections):
            return
        remembered = memory.open_section(e.section)
        for key, known in remembered.items():
            kept = tuple(replace(k, handle=lane.executor.retained_handle(memory, key, k)) for k in known.retained)
            remembered[key] = replace(known, retained=kept)
        lane.feed(ev.SectionOpened(e.domain, e.section, memory.space.blocks[e.section.index], remembered))
        lane.workers.section_opened()
