"""Who waits to be let into a job, and what they and the members are told.

What may live here: tests of `gcserver/runtime/applicants.py` over control machines. What may not: who is let in
(`core/test_admission.py`), real jobs (`tests/system/test_rejoin.py`).
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcproto.epoch_messages import Admit
from gcproto.messages import Waiting
from gcserver.admin.source import PeerState
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.events import PeerAdded
from gcserver.runtime import applicants
from gcserver.runtime.applicants import Applicants, waiting
from gcserver.runtime.linkstates import LinkState
from tests.unit.core.control_machine import formed, machine, register, said
from tests.unit.core.test_admission import b_joins, without_b
from tests.unit.core.test_epochs import pair

B = wire.node_id("b")


def over(m: ControlMachine, state: PeerState = PeerState.UP, reason: str = "") -> tuple[Applicants, list[ce.Tell]]:
    """Over the machine of node a that knows b, and what workers were told."""
    told: list[ce.Tell] = []
    table = {B: LinkState(B, state, time.monotonic() - 5.0, reason)}
    supervisor: Any = SimpleNamespace(
        machine=m, registrations=SimpleNamespace(tell=told.append), lanes=SimpleNamespace(table=[]),
        peers=SimpleNamespace(addresses={"b": "tcp://b:1"}, states=SimpleNamespace(table=table)),
        config=SimpleNamespace(cluster=SimpleNamespace(lease=20.0)),
    )  # fmt: skip
    return Applicants(supervisor), told


def test_who_waits_is_shown_with_since_when_and_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(applicants.time, "monotonic", lambda: clock[0])
    m = without_b()
    seen, told = over(m)
    seen.tick()
    assert seen.shown() == ()
    b_joins(m, 4)
    seen.tick()
    clock[0] = 107.0
    seen.tick()
    (shown,) = seen.shown()
    assert (shown.node, shown.job, shown.since) == ("b", "train", 7.0)
    assert shown.reason == "ranks 0 on a have not come to gcclient.admit()" and not told, "nobody stands there"
    said(m, 1, Admit(1), 43.0)
    assert seen.shown()[0].reason == "the arbiter decides the next epoch"
    (job,) = m.jobs.values()
    job.change.silent = "connection refused"
    clock[0] = 110.0
    seen.tick()
    assert told == [
        ce.Tell(1, Waiting("b to be let into job 'train': the arbiter decides the next epoch: connection refused"))
    ]
    seen.tick()
    assert len(told) == 1, "not at every tick"
    job.applicants.clear()
    assert seen.shown() == () and waiting(job) == []


def test_members_that_are_not_at_the_point_are_named_with_how_they_are() -> None:
    m, _ = pair()
    said(m, 1, Admit(1), 1.0)
    (job,) = m.jobs.values()
    for state, reason, expected in (
        (PeerState.UP, "", "not there yet: b (its ranks have not come to gcclient.admit())"),
        (PeerState.REFUSED, "another key", "not there yet: b (refused: another key)"),
    ):
        seen, told = over(m, state, reason)
        assert seen.why(job) == expected
        seen.tick()
        assert [t.message for t in told] == [Waiting(f"nodes to be let into job 'train': {expected}")]
    job.lost["b"] = "silent"
    assert over(m)[0].why(job) == "the job goes on without b first"


def test_who_has_yet_to_be_in_a_job_hears_which_daemons_have_sent_nobody() -> None:
    m = machine(arbiter=True)
    m.on(PeerAdded(B, "b"), 0.0)
    said(m, 1, register(0, 2))
    seen, _ = over(m)
    assert seen.explained(1, "ranks [1]") == "ranks [1]; no workers of it have come to b"
    (g,) = m.gatherings.values()
    g.workers[0] = 1, SimpleNamespace(on_loss="shrink")  # type: ignore[assignment]
    hint = ", or they are in it already and let this node in when all of them call gcclient.admit()"
    assert seen.explained(1, "ranks [1]") == "ranks [1]; no workers of it have come to b" + hint
    assert seen.explained(9, "something else") == "something else"
    m.formation.joins["train"]["b"] = m.formation.joins["train"]["a"]
    assert seen.explained(1, "ranks [1]") == "ranks [1]"
    assert (
        over(m, PeerState.CONNECTING)[0].explained(1, "ranks [1]; peers not reached: b")
        == "ranks [1]; peers not reached: b"
    )


def test_a_thousand_nodes_are_not_all_named() -> None:
    m = formed()
    (job,) = m.jobs.values()
    job.workers.update(dict.fromkeys(range(1, 1001)))
    assert over(m)[0].why(job) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 993 more on a have not come to gcclient.admit()"
