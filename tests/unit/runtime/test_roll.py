"""Which peers are shown, and for how long after they went.

What may live here: tests of `gcserver/runtime/roll.py`. What may not: series of peers (`tests/unit/admin`), sockets.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcserver.admin import catalogue
from gcserver.admin.source import PeerState
from gcserver.core.link import Link
from gcserver.runtime.linkstates import LinkState
from gcserver.runtime.observe import Observer
from gcserver.runtime.roll import SHOWN_FOR, Roll, members, wanted
from gcserver.runtime.status import Status
from gcserver.values import Address
from tests.unit.core.control_machine import formed


def shown(roll: Roll, now: float, members: str = "", wanted: str = "") -> str:
    roll.call("bcd", set(members), lambda name: name in wanted, now)
    return "".join(name for name in "bcd" if roll.has(name))


def test_who_went_is_shown_for_a_while_and_whoever_is_back_again() -> None:
    roll = Roll()
    assert shown(roll, 10.0, members="c", wanted="b") == "bcd"
    assert shown(roll, 10.0 + SHOWN_FOR, wanted="b") == "bcd"
    assert shown(roll, 11.0 + SHOWN_FOR, wanted="b") == "b"
    assert shown(roll, 20.0 + SHOWN_FOR, members="c", wanted="d") == "bcd"
    assert shown(roll, 19.0 + 2 * SHOWN_FOR) == "cd"


def test_the_log_says_once_who_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    roll = Roll()
    with caplog.at_level(logging.INFO):
        for second in range(0, 3 * int(SHOWN_FOR), 60):
            roll.call(["b"], set(), lambda name: False, float(second))
    assert [r.message for r in caplog.records] == [
        "peer b is shown no longer: it is in no job and not in cluster.peers, and away"
    ]


def standing(state: PeerState, heard: bool, keys: Any = None) -> Any:
    """What is asked of a supervisor about b."""
    b = wire.node_id("b")
    link = Link(1, 5, b, "b", theirs=7 if heard else 0)
    return SimpleNamespace(
        machine=SimpleNamespace(links={b: link}), keys=keys,
        peers=SimpleNamespace(states=SimpleNamespace(table={b: LinkState(b, state, 1.0)})),
    )  # fmt: skip


def test_who_is_up_or_configured_is_wanted() -> None:
    assert wanted(standing(PeerState.UP, True), frozenset(), "b")
    assert not wanted(standing(PeerState.DEAD, True), frozenset(), "b")
    assert wanted(standing(PeerState.DEAD, True), frozenset("b"), "b")


def test_a_key_that_was_taken_out_counts_and_one_that_was_never_there_does_not() -> None:
    without = SimpleNamespace(admitted={})
    assert not wanted(standing(PeerState.REFUSED, True, without), frozenset("b"), "b")
    assert wanted(standing(PeerState.REFUSED, False, without), frozenset("b"), "b"), "forgotten in security.peers"
    assert wanted(standing(PeerState.DEAD, True, SimpleNamespace(admitted={"b": b"k"})), frozenset("b"), "b")


def test_members_of_jobs_are_those_it_began_with() -> None:
    m = formed()
    (job,) = m.jobs.values()
    supervisor: Any = SimpleNamespace(machine=m)
    assert members(supervisor) == {x.node for x in job.record.origin} != set()


def test_operators_and_prometheus_see_the_same_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(advertise=Address("a.cluster", 7470), metrics=None)
    roll = Roll()
    supervisor: Any = SimpleNamespace(
        node="a", config=SimpleNamespace(node=node), counts={}, lanes=SimpleNamespace(table=[]),
        machine=SimpleNamespace(jobs={}, gatherings={}), planning=SimpleNamespace(link=SimpleNamespace(spent={})),
        peers=SimpleNamespace(addresses={"b": "tcp://b:1", "c": "tcp://c:1"}, roll=roll),
    )  # fmt: skip
    status = Status.__new__(Status)
    status._s, status._service = supervisor, None
    status.node = lambda: SimpleNamespace(lanes=())  # type: ignore[method-assign, assignment, return-value]
    seen = SimpleNamespace(state=PeerState.UP, rtt=0.5, lanes=())
    monkeypatch.setattr(
        "gcserver.runtime.status.peer_status", lambda s, name, *more: SimpleNamespace(name=name, **vars(seen))
    )
    observer = Observer(supervisor, status)
    monkeypatch.setattr(observer, "_norms", lambda: None)

    def series() -> set[str]:
        observer.refresh()
        found = observer._metrics.registry.collect()
        return {s.labels["peer"] for f in found if f.name == catalogue.PEER_UP.name for s in f.samples}

    roll.call("bc", set(), lambda name: True, 0.0)
    assert [p.name for p in status.peers()] == ["b", "c"] and series() == {"b", "c"}
    roll.call("bc", set(), lambda name: name == "b", SHOWN_FOR + 1.0)
    assert [p.name for p in status.peers()] == ["b"] and series() == {"b"}
