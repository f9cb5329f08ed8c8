"""What of a job's memory cannot be.

What may live here: tests of `gcserver/core/restoring.py`. What may not: files (`runtime/test_ledger.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gcproto.epoch_messages import EpochStart
from gcproto.messages import MemberInfo, PlanText
from gcserver.core.control_events import DomainLedger, ForgetJob, JobMemory, JobRestored, Log
from gcserver.core.restoring import damage
from tests.unit.core.control_machine import formed, machine

LEDGER = DomainLedger(3, (2,), ((0, 0), (5, 1)))


def memory(**changes: Any) -> JobMemory:
    (job,) = formed().jobs.values()
    found = replace(job.save().memory, plans=(PlanText(job.id, 1, 7, ()),), proposal=1, numbered=1)
    return replace(found, **changes)


def test_what_was_written_can_be() -> None:
    assert damage(memory(), (LEDGER,), "a") == ""
    assert damage(memory(), (DomainLedger(0, (), ((0, 0),)),), "a") == ""


def test_so_can_what_was_written_after_a_loss() -> None:
    record = memory().record
    gone = MemberInfo("b", "tcp://b:1", (1,))
    later = msgspec.structs.replace(record, epoch=2, world_size=2, lost=((gone,),), starts=(EpochStart(2, 0, 3, 4),))
    assert damage(memory(record=later), (LEDGER,), "a") == ""


def _record(**changes: Any) -> dict[str, Any]:
    return {"record": msgspec.structs.replace(memory().record, **changes)}


def _declared(**changes: Any) -> dict[str, Any]:
    ((declared, sections),) = memory().domains
    return {"domains": ((msgspec.structs.replace(declared, **changes), sections),)}


def _sections() -> dict[str, Any]:
    ((declared, sections),) = memory().domains
    return {"domains": ((declared, (msgspec.structs.replace(sections[0], index=4),)),)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (_record(epoch=1 << 32), "epoch 4294967296"),
        (_record(epoch=0), "epoch 0"),
        (_record(epoch=2), "of epoch 2 it says who left at the beginning of 0 after the first"),
        (_record(deadline=float("nan")), "deadline nan"),
        (_record(partition_bytes=1 << 40), "partitions of 1099511627776"),
        (_record(job=b"short"), "a number of 5 bytes"),
        (_record(nonces=()), "0 nonces"),
        (_record(lost=((MemberInfo("b", "tcp://b:1", ()),),)), "does not fit together"),
        (_record(lost=((MemberInfo("a", "tcp://a:1", (1,)),),), world_size=2), "does not fit together"),
        (_record(starts=(EpochStart(1, 0, 4, 3),)), "begin where none can"),
        (_record(starts=(EpochStart(2, 0, 3, 3),)), "begin where none can"),
        (_record(starts=(EpochStart(1, 0, 3, 1 << 60),)), "at most 1048576 steps apart"),
        (_record(world_size=1 << 40), "at most 65536"),
        ({"ranks": (0, 9)}, "ranks (0, 9) of a"),
        ({"proposal": 4}, "proposal 4"),
        ({"numbered": -1}, "-1 ever numbered"),
        ({"lost": (("b", "silent"),)}, "the loss of b"),
        ({"lost": (("a", "silent"),)}, "the loss of a"),
        ({"domains": ()}, "1 ledgers"),
        (_declared(domain=1 << 32), "process group 4294967296"),
        (_declared(ranks=(0, 0)), "ranks (0, 0)"),
        (_declared(ranks=(0, 5)), "ranks (0, 5) of 1"),
        (_declared(ranks=(5,)), "ranks (5,)"),
        (_sections(), "section 4 in place of 0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in damage(memory(**changes), (LEDGER,), "a")


@pytest.mark.parametrize(
    "ledger",
    [
        DomainLedger(1 << 63, (), ((0, 0),)),
        DomainLedger(3, (), ((0, 0), (1 << 63, 1))),
        DomainLedger(3, (), ((0, 0),), 1 << 63),
        DomainLedger(3, (), ((0, 0), (9, 1), (5, 1))),
        DomainLedger(3, (), ((0, 0), (5, 7))),
    ],
)
def test_so_is_a_ledger_that_does_not_go_with_it(ledger: DomainLedger) -> None:
    assert "process group 0" in damage(memory(), (ledger,), "a")


@pytest.mark.parametrize(("numbered", "fits"), [(0, False), (6, False), (7, True)])
def test_a_forgotten_plan_is_one_that_was_given_a_number(numbered: int, fits: bool) -> None:
    """A lossless group runs under plans whose texts are gone; a number that nobody gave is damage there too."""
    found = memory(numbered=numbered, **_declared(codec="none"))
    said = damage(found, (DomainLedger(3, (), ((0, 0), (5, 7))),), "a")
    assert (not said) if fits else "process group 0: plans [0, 7] in its ledger" in said


def test_another_nodes_memory_is_none_of_this_node() -> None:
    assert "of b, which has None" in damage(memory(), (LEDGER,), "b")


def test_a_daemon_drops_such_a_job_and_goes_on() -> None:
    m = machine()
    bad = memory(proposal=4)
    out = m.on(JobRestored(bad, (LEDGER,)), 0.0)
    assert [type(e) for e in out] == [Log, ForgetJob]
    assert not m.jobs
    m.on(JobRestored(memory(), (LEDGER,)), 0.0)
    assert len(m.jobs) == 1
