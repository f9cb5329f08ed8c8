"""The profile of each domain, filled while its job runs, kept for the next run.

What may live here: whose measurement is whose, when a profile is loaded and saved. What may not: what samples come to
(`measurements.py`), files (`profilestore.py`), measuring (`gcclient.timing`, `kernelclock.py`), planning.

Costs of codecs, of the link and errors are measured elsewhere and given to :meth:`Profiler.profile`, which remembers
them. Only domains whose step is a whole backward pass have a profile: where every call is a step there is no
computation between a first and a last gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from gcproto.audits import AUDIT_OF, audit_label
from gcproto.dtypes import DType
from gcproto.manifest import USED, Section, TensorSpec
from gcproto.timings import TensorTimes
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import LogSettled
from gcserver.core.events import DomainKey, Member
from gcserver.core.job import SCOPED_LAG, Job
from gcserver.planner.profile import CodecCost, LevelErrors, LinkCost, Profile, ProfiledTensor
from gcserver.runtime.lanelink import KernelTimes
from gcserver.runtime.measurements import Kernels, Paces, Readiness
from gcserver.runtime.profilestore import ProfileStore, file_name
from gcserver.runtime.tensors import space

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: A series of measured steps is over when none came for so many seconds: then the profile is saved,
QUIET: Final = 2.0
#: and so often at most where only costs, link or errors were learned.
SAVE_EVERY: Final = 30.0
#: until somebody has measured the link: 1 Gbit/s and a local network's latency
GUESS: Final = LinkCost(1e-4, 1.25e8)


@dataclass(slots=True)
class Watched:
    """One domain. ``name``: of its file. ``kept``: what an earlier run left. ``due``: when it is to be saved.
    ``saving``: what was saved last is still on its way to the disk. ``audited``: a step of an audit settled since its
    newest one."""

    job: Job
    domain: ControlDomain
    name: str = ""
    sections: int = 0
    members: tuple[Member, ...] = ()
    readiness: Readiness = field(default_factory=lambda: Readiness(0))
    paces: Paces = field(default_factory=Paces)
    kernels: Kernels = field(default_factory=Kernels)
    kept: Profile | None = None
    learned: dict[str, Any] = field(default_factory=dict)
    due: float = inf
    saved: float = -inf
    saving: bool = False
    audited: bool = False


class Profiler:
    """All profiles of one daemon."""

    def __init__(self, supervisor: Supervisor, clock: Callable[[], float] = time.monotonic) -> None:
        self._s, self._clock = supervisor, clock
        self._store = ProfileStore(supervisor.config.plan.profiles, supervisor.warn_once)
        self._table: dict[DomainKey, Watched] = {}

    # ------------------------------------------------------------------------------------ what is measured
    def on_tensor_times(self, worker: tuple[bytes, int] | None, message: TensorTimes) -> None:
        """A worker, as (job, rank), measured a step."""
        watched = self._watched((worker[0], message.domain)) if worker is not None else None
        if worker is None or watched is None:
            return
        try:
            counts = watched.readiness.add(worker[1], message)
        except ValueError as error:
            self._s.warn_once(f"measurements of rank {worker[1]} cannot be used: {error}")
            return
        if counts:
            watched.due = self._clock() + QUIET

    def on_kernels(self, message: KernelTimes) -> None:
        """A lane timed some of its calls."""
        watched = self._watched(message.domain)
        if watched is not None:
            watched.kernels.add(message.times)

    def on_settled(self, e: LogSettled) -> None:
        """A step settled."""
        watched = self._watched(e.domain)
        if watched is None:
            self._audited(e.domain)
            return
        # Nor does a step of the warm-up say anything of the plan that waits for its end, nor one before which gradients
        # were exchanged once more, all of them and dense.
        nothing = e.void or e.step <= watched.domain.config.warmup or watched.audited
        watched.audited = False
        watched.paces.settled(e.step, watched.domain.switch(e.step)[1], self._clock(), nothing)

    def _audited(self, key: DomainKey) -> None:
        """A step settled of a domain that is no model's: the next steps of all models took the longer if it is an
        audit's."""
        job = self._s.machine.jobs.get(key[0])
        domain = job.domains.get(key[1]) if job is not None else None
        if domain is None or not domain.config.label.startswith(AUDIT_OF):
            return
        mine = [watched for (number, _), watched in self._table.items() if number == key[0]]
        for watched in mine:
            declared = watched.domain.declared_as
            # Where every step of a model is audited they are all alike, under whatever plan.
            if domain.config.label == audit_label(declared.label, declared.audit):
                return
        for watched in mine:
            watched.audited = True

    def on_declared(self, job: bytes) -> None:
        """Something about the job's memory changed: perhaps it has more tensors."""
        for domain in self._s.machine.jobs[job].domains if job in self._s.machine.jobs else ():
            self._watched((job, domain))

    def _watched(self, key: DomainKey) -> Watched | None:
        job = self._s.machine.jobs.get(key[0])
        domain = job.domains.get(key[1]) if job is not None else None
        if job is None or domain is None or domain.config.lag != SCOPED_LAG:
            return None
        watched = self._table.get(key)
        if watched is None:
            watched = self._table[key] = Watched(job, domain)
        if watched.sections != len(domain.sections):
            self._take_up(watched)
        elif watched.members != domain.config.members:
            # What was measured of the tensors stays; the next run of so many nodes is to find it.
            self._name(watched)
        return watched

    def _take_up(self, watched: Watched) -> None:
        """The domain has other tensors than were known: what was measured of the old ones is over."""
        domain = watched.domain
        watched.sections, watched.kept = len(domain.sections), None
        watched.readiness = Readiness(sum(len(s.tensors) for s in _models(domain)))
        name = self._name(watched)

        def loaded(profile: Profile | None) -> None:
            if profile is not None and watched.name == name:
                watched.kept = profile

        self._s.filing.do(name, lambda: self._store.load(name), loaded)

    def _name(self, watched: Watched) -> str:
        """The profile's file, by the tensors and the nodes of now."""
        domain, label = watched.domain, watched.job.record.label
        watched.members = domain.config.members
        watched.name = file_name(label, domain.config.label, tuple(domain.sections), watched.members, self._s.node)
        return watched.name

    # ------------------------------------------------------------------------------------- what is known
    def profile(
        self,
        job: bytes,
        domain: int,
        costs: Mapping[str, CodecCost] | None = None,
        link: LinkCost | None = None,
        errors: Mapping[str, tuple[LevelErrors, ...]] | None = None,
    ) -> Profile | None:
        """What is known of a domain; None before anything was measured, here or in an earlier run.

        ``costs`` by spec, ``link`` and ``errors`` by family are remembered; where one is None it is what was given
        last, else what an earlier run left, else nothing (of the link: a guess, without samples). ``costs`` add to
        those that were given before: whoever plans and whoever advises ask for other codecs.
        """
        watched = self._watched((job, domain))
        if watched is None:
            return None
        if costs is not None:
            costs = {**watched.learned.get("codecs", {}), **costs}
        given = {"codecs": costs, "link": link, "errors": errors}
        news = {k: v for k, v in given.items() if v is not None and v != watched.learned.get(k)}
        if news:
            watched.learned.update(news)
            watched.due = min(watched.due, max(self._clock(), watched.saved + SAVE_EVERY))
        return self._compose(watched)

    def _compose(self, watched: Watched) -> Profile | None:
        kept, measured = watched.kept, watched.readiness
        if measured.count:
            tensors, forward = _tensors(watched.domain, measured.ready()), measured.forward()
            buckets, tolerant = measured.buckets(), measured.tolerant()
        elif kept is not None:
            tensors, forward, buckets, tolerant = kept.tensors, kept.forward, kept.buckets, kept.tolerant
        else:
            return None
        c, lanes = watched.domain.config, self._s.config.node.lanes
        known: dict[str, Any] = {"link": GUESS}
        if kept is not None:
            known |= {name: getattr(kept, name) for name in _LASTING}
        known |= watched.learned
        if (copy := measured.copy()) is not None:
            known["copy"] = copy
        if (busy := watched.kernels.busy(known.get("codecs", {}))) is not None:
            known["busy"] = max(1.0, busy)
        return Profile(
            watched.job.record.label, c.label, len(c.members), c.local_ranks, lanes, forward, tensors,
            partition_bytes=c.partition_bytes, min_compress_bytes=c.min_compress_bytes,
            blocks=_blocks(watched.domain, lanes), steps=watched.paces.steps(),
            whole=c.whole, buckets=buckets, tolerant=tolerant, **known,
        )  # fmt: skip

    def knows_link(self, job: bytes, domain: int) -> bool:
        """Whether the link was measured, by this run or an earlier one."""
        watched = self._watched((job, domain))
        if watched is None:
            return False
        kept = watched.kept.link if watched.kept is not None else GUESS
        return bool(watched.learned.get("link", kept).samples)

    def departed(self, job: bytes, domain: int) -> float:
        """By which share a domain's newest steps are longer or shorter than all under the same plan."""
        watched = self._watched((job, domain))
        return watched.paces.departed() if watched is not None else 0.0

    def measure_again(self, job: bytes, domain: int) -> None:
        """Steps are to be measured anew, since the link is another one."""
        watched = self._watched((job, domain))
        if watched is not None:
            watched.paces.forget()

    # ------------------------------------------------------------------------------------------- keeping
    def tick(self) -> None:
        """Save what is due, unless what was saved before is still on its way to the disk."""
        now = self._clock()
        for watched in self._table.values():
            if now >= watched.due:
                if watched.saving:
                    watched.due = now + SAVE_EVERY
                else:
                    self._save(watched)

    def forget(self, job: bytes) -> None:
        """The job has left this node."""
        for key in [k for k in self._table if k[0] == job]:
            self._save_last(self._table.pop(key))

    def close(self) -> None:
        """The daemon stops: save what there is, with the files that are still to be written (`filing.py`)."""
        for watched in self._table.values():
            self._save_last(watched)

    def _save_last(self, watched: Watched) -> None:
        """Whatever this run measured, since the times of its steps went on after the last series."""
        if watched.readiness.count or watched.due < inf:
            self._save(watched)

    def _save(self, watched: Watched) -> None:
        watched.due, watched.saved = inf, self._clock()
        name = watched.name
        try:
            profile = self._compose(watched)
        except Exception as error:  # a defect here must not end the daemon, nor the job
            self._s.warn_once(f"profile {name} cannot be made, it is not saved: {type(error).__name__}: {error}")
            return
        if profile is None:
            return

        def save() -> None:
            try:
                self._store.save(name, profile)
            finally:
                watched.saving = False

        watched.saving = True
        if not self._s.filing.do(name, save):
            watched.saving, watched.due = False, self._clock() + SAVE_EVERY


#: What an earlier run's profile still tells. Its plans' numbers mean nothing in this one.
_LASTING: Final = ("link", "copy", "round_seconds", "busy", "codecs", "errors")


def _models(domain: ControlDomain) -> list[Section]:
    """The sections of the model itself; what a worker adds to them comes last and has no ready times."""
    return [s for s in domain.sections if s.tensors[0].name != USED]


def _tensors(domain: ControlDomain, ready: list[float]) -> tuple[ProfiledTensor, ...]:
    """All tensors in the order of readiness; of equals the one declared first."""
    found, address = [], 0
    for (spec, together), seconds in zip(_grouped(domain), ready, strict=True):
        label = DType(spec.dtype).label
        found.append(ProfiledTensor(spec.name, spec.shape, spec.elements, label, seconds, address, together))
        address += spec.elements
    return tuple(sorted(found, key=lambda t: t.ready))


def _grouped(domain: ControlDomain) -> Iterator[tuple[TensorSpec, int]]:
    """Every tensor with the bytes of its group."""
    for group in (group for section in _models(domain) for group in section.groups):
        nbytes = sum(spec.elements for spec in group) * DType(group[0].dtype).itemsize
        yield from ((spec, nbytes) for spec in group)


def _blocks(domain: ControlDomain, lanes: int) -> tuple[tuple[int, int, int, int], ...]:
    """(address, elements, owner, lane) of all blocks."""
    out, first = [], 0
    for section, blocks in zip(_models(domain), space(domain, lanes).blocks, strict=False):
        out += [(first + b.start, b.elements, b.owner, b.lane) for b in blocks]
        first += section.elements
    return tuple(out)
