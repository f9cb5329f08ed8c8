"""The dashboard's side of the daemon: it looks at the daemon while somebody watches, and tells all who do.

What may live here: when to look, and what to say when looking fails. What may not: what a look becomes (`overview.py`,
`details.py`), who listens (`streams.py`), the page's files (`pages.py`), who may see it (`exposition.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gcserver.admin import overview, pages
from gcserver.admin.details import details
from gcserver.admin.http import Answer, Request, text
from gcserver.admin.overview import Change, Look
from gcserver.admin.source import AdminError, JobStatus, PlanStatus, Source
from gcserver.admin.streams import Streams, encoded

#: Seconds between looks at what costs nothing to know, and at what lanes have to be asked for.
EVERY: Final = 2.0
CLOSER_EVERY: Final = 10.0
#: The jobs with the most steps settled last are looked at closer; of others only their state is shown.
MOST_JOBS: Final = 8
#: What happened of late, as long as somebody watches.
MOST_CHANGES: Final = 100
EVENTS: Final = pages.PARTS + "events"
log = logging.getLogger("gcserver.admin")


class Dashboard:
    """Over one source. ``names``: under which the machine is known, in lower case, beside its addresses."""

    def __init__(
        self,
        source: Source,
        names: frozenset[str] = frozenset(),
        every: float = EVERY,
        closer_every: float = CLOSER_EVERY,
    ) -> None:
        self._source, self.names = source, names
        self._every, self._closer_every = every, closer_every
        self.streams = Streams(self._watched)
        self._files = pages.load()
        self._before: Look | None = None
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        #: ids of the jobs that are looked at closer
        self._shown: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._news = {what: asyncio.Event() for what in ("overview", "details")}
        #: what went wrong at the newest look of each kind, so that the log has it once
        self._troubles: dict[str, str] = {}

    def answer(self, request: Request) -> Answer | None:
        """A file, or why there is no stream now; None for what is not ours, and for a stream."""
        if request.path == EVENTS:
            if request.method != "GET":
                return text(405, "only GET", ("Allow", "GET"))
            if self.streams.full:
                pages_open = f"{len(self.streams)} pages are open on this dashboard"
                return text(503, f"{pages_open}; close one, or ask another node")
            return None
        return self._files.get(request.path)

    async def stop(self) -> None:
        """Looks under way are given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------- looking
    def _watched(self) -> None:
        """Somebody watches after nobody did."""
        for task in self._tasks:
            task.cancel()
        self._tasks = [
            asyncio.ensure_future(self._again_and_again("overview", self._look, self._every)),
            asyncio.ensure_future(self._again_and_again("details", self._look_closer, self._closer_every)),
        ]

    async def _again_and_again(self, what: str, look: Callable[[], Coroutine[Any, Any, None]], every: float) -> None:
        """Every so many seconds; closer looks also when jobs are not what they were."""
        while len(self.streams):
            try:
                await look()
                if self._troubles.pop(what, None) is not None:
                    self._say(f"trouble {what}", {"what": what, "text": ""}, "trouble")
            except Exception as error:  # a defect: those who watch hear of it, the daemon goes on
                said = f"{type(error).__name__}: {error}"
                if self._troubles.get(what) != said:
                    log.exception("the dashboard's look at %s failed", what)
                self._troubles[what] = said
                about = {"what": what, "text": f"{said}; the daemon's log has more"}
                self._say(f"trouble {what}", about, "trouble")
            try:
                async with asyncio.timeout(every):
                    await self._news[what].wait()
            except TimeoutError:
                pass
            self._news[what].clear()

    async def _look(self) -> None:
        source = self._source
        now = Look(time.monotonic(), time.time(), source.node(), tuple(source.peers()), tuple(source.jobs()))
        before = overview.recent(self._before, now)
        if before is not None:
            self._changes.extend(overview.changes(before, now))
            if _shape(before) != _shape(now):
                self._news["details"].set()
        self._say("overview", overview.overview(now, before, self._changes))
        self._before = now

    async def _look_closer(self) -> None:
        jobs = sorted((j for j in self._source.jobs() if j.id), key=lambda j: -j.step)[:MOST_JOBS]
        for gone in self._shown - {j.id for j in jobs}:
            self.streams.forget(f"details {gone}")
        self._shown = {j.id for j in jobs}
        for job in jobs:
            await self._look_closer_at(job)

    async def _look_closer_at(self, job: JobStatus) -> None:
        try:
            tensors = await self._source.tensors(job.id, "", "")
            plan = await self._plan(job.id)
        except AdminError:
            return  # it ended meanwhile, or one of its codecs is gone, which its state says
        if job.id in self._shown:
            self._say(f"details {job.id}", details(job, tensors, plan), "details")

    async def _plan(self, job: str) -> PlanStatus:
        """With a step drawn, where one can be predicted."""
        try:
            return await self._source.plan(job, timeline=True)
        except AdminError:
            return await self._source.plan(job, timeline=False)

    def _say(self, topic: str, said: dict[str, Any], event: str = "") -> None:
        data = json.dumps(said, separators=(",", ":"), allow_nan=False).encode()
        self.streams.publish(topic, encoded(event or topic, data))


def _shape(look: Look) -> list[tuple[str, int, int]]:
    """Of the jobs: what a closer look depends on."""
    return [(j.id, j.plan_version, sum(d.tensors for d in j.domains)) for j in look.jobs]
