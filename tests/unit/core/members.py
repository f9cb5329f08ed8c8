"""The jobs of several nodes for tests, and what they say to each other, delivered when a test wants it.

What may live here: setting them up, carrying messages and epochs. What may not: tests, links, lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcproto import messages
from gcproto.epoch_messages import JobState
from gcproto.messages import DeclareDomain, EpochDecided, MemberInfo, Rule
from gcserver.core import control_events as ce
from gcserver.core import epochs, job_messages, job_plans
from gcserver.core.early_messages import EarlyMessages
from gcserver.core.effects import ReportStep
from gcserver.core.job import Job
from tests.unit.core.control_machine import resolve

JOB = b"j" * 16


class Members:
    """Nodes named as they are given, the first of them makes the plans; each has one rank and one lane. ``out``: by
    node the effects of all that it did."""

    def __init__(self, names: str, on_loss: str = "shrink") -> None:
        infos = tuple(MemberInfo(n, f"tcp://{n}:7000", (i,)) for i, n in enumerate(names))
        nonces = tuple(range(1, len(names) + 1))
        record = EpochDecided("train", JOB, 1, len(names), infos, nonces, (Rule("*", "none"),), on_loss=on_loss)
        self.jobs = {n: Job(record, n, 1, resolve) for n in names}
        self.out: dict[str, list[Any]] = {n: [] for n in names}
        self._way: dict[tuple[str, str], list[Any]] = {}
        self._early: dict[str, EarlyMessages[messages.OfJob]] = {n: EarlyMessages() for n in names}

    def __getitem__(self, name: str) -> Job:
        return self.jobs[name]

    def did(self, name: str, effects: Sequence[Any]) -> None:
        """``name`` did something: remember the effects, send what it has to say."""
        self.out[name] += effects
        for to, message in self[name].outgoing:
            self._way.setdefault((name, to), []).append(message)
        self[name].outgoing.clear()

    def deliver(self, *pairs: str, times: int = 1) -> None:
        """What is on its way: of "bc" from b to c; of all that are left, until nothing is, where nothing is named."""
        named = [(pair[0], pair[1]) for pair in pairs]
        while ways := [way for way in named or self._way if self._way.get(way) and way[1] in self.jobs]:
            for sender, to in ways:
                for m in self._way.pop((sender, to)):
                    for _ in range(times):
                        self.say(sender, to, m)

    def say(self, sender: str, to: str, m: Any) -> None:
        """``to`` hears a message of ``sender``."""
        job = self[to]
        if isinstance(m, EpochDecided):
            self.did(to, job_messages.on_record(job, sender, m))
        elif not isinstance(m, JobState | messages.JobLeft):
            self.did(to, job_messages.on_message(job, sender, m, self._early[to]))

    def decided(self, by: str) -> EpochDecided:
        """The epoch that ``by`` asked for."""
        return next(e.record for e in reversed(self.out[by]) if isinstance(e, ce.Arbitrate))

    def hear(self, name: str, record: EpochDecided, of: str = "") -> None:
        """``name`` hears of an epoch from ``of``, or from the arbiter."""
        self.did(name, job_messages.on_record(self[name], of, record))

    def die(self, name: str) -> None:
        """A node is gone, and what it still had to say; those that are left notice and freeze."""
        del self.jobs[name]
        for way in [w for w in self._way if name in w]:
            del self._way[way]
        for other, job in self.jobs.items():
            self.did(other, epochs.lose(job, name, f"{name} is silent"))
        left = list(self.jobs)
        self.deliver(*(a + b for a in left for b in left if a != b))

    def restart(self, name: str, memory: ce.JobMemory | None = None) -> None:
        """A new process of a node, with the memory that was saved; nothing of what was on its way to or from it is
        left. Every link is up again at once, at both ends."""
        old = self[name]
        saved = memory or old.save().memory
        ledgers = tuple(ce.DomainLedger(d.settled, (), tuple(d.switches), d.ready) for d in old.domains.values())
        job = self.jobs[name] = Job(saved.record, name, 1, resolve)
        job.restore(saved, ledgers)
        for way in [w for w in self._way if name in w]:
            del self._way[way]
        self._early[name] = EarlyMessages()
        self.did(name, job_plans.resume(job))
        for other in [n for n in self.jobs if n != name]:
            self.did(other, job_messages.on_peer_up(self[other], name, False))
            self.did(name, job_messages.on_peer_up(job, other, False))

    def declare(self) -> None:
        """All declare the same model."""
        for job in self.jobs.values():
            job.add_domain(DeclareDomain("ddp", 0, tuple(range(job.record.world_size)), True))

    def finish(self, name: str, step: int, proposal: int = 0, epoch: int = 1) -> None:
        """The lane of a node has finished a step."""
        self.did(name, epochs.on_step(self[name], 0, ReportStep((JOB, 0), step, False, proposal, 0, epoch)))

    def ask(self, name: str, request: int, spec: str = "topk") -> None:
        """An operator wants a codec, at a node."""
        wish = ce.SetPlan(request, "train", (Rule("*", spec),))
        self.did(name, job_plans.set_plan(self[name], 100 + request, wish))

    def answers(self, name: str) -> list[tuple[int, int, str]]:
        """(request, plan, error) of all that were answered at a node."""
        return [(e.request, e.plan, e.error) for e in self.out[name] if isinstance(e, ce.AnswerRequest)]
