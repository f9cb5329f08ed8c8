"""Admission points, and a worker that comes into a running job, as a worker sees them.

What may live here: tests of `gcclient/admission.py` and of what `session.py`, `domain.py` and `calls.py` take over.
What may not: who is let in (`tests/unit/core/test_admission.py`), real jobs (`tests/system/test_rejoin.py`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import torch

import gcclient
from gcclient import places
from gcclient.api import current
from gcproto.dtypes import DType
from gcproto.epoch_messages import Admit, DomainFacts, NodesWait
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import (
    DeclareDomain,
    DeclareSection,
    EpochChanged,
    Fault,
    MemberInfo,
    Register,
    Registered,
    Waiting,
)
from tests.unit.client.fake import PARTITION, TICKET, FakeDaemon, FakeDomain

BACK = MemberInfo("other1", "tcp://127.0.0.1:1", (1,), 3)
MEMBERS = (MemberInfo("fake", "tcp://127.0.0.1:1", (0,)), BACK)


@pytest.fixture
def shrinking(daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    daemon.commits, daemon.size = True, 2
    gcclient.init(0, 2, socket=daemon.socket, job="unit", on_loss="shrink")
    yield daemon
    gcclient.shutdown()


def admits(daemon: FakeDaemon) -> list[Admit]:
    return [m for m in daemon.heard[-1] if isinstance(m, Admit)]


def knock(daemon: FakeDaemon) -> None:
    daemon.say(-1, NodesWait(("other1",)))
    daemon.wait(lambda: current().membership.waiting)


def test_nobody_waits_and_nothing_is_asked(shrinking: FakeDaemon) -> None:
    assert gcclient.admit() == () and gcclient.root_rank() == 0
    assert admits(shrinking) == []


def test_where_nobody_can_come_back_it_costs_nothing(joined: FakeDaemon) -> None:
    assert gcclient.admit() == () and gcclient.stats()["calls"] == 0


def test_who_waits_is_let_in_and_named(shrinking: FakeDaemon) -> None:
    gcclient.push_pull(torch.ones(2))
    gcclient.push_pull(torch.ones(2))
    knock(shrinking)
    shrinking.answer = lambda m: EpochChanged(3, MEMBERS, 1) if isinstance(m, Admit) else None
    assert gcclient.admit() == (1,) and admits(shrinking) == [Admit(1)]
    assert not current().membership.waiting and gcclient.size() == 2 and gcclient.root_rank() == 0
    gcclient.push_pull(torch.ones(2))
    places = gcclient.api.current_calls()._unnamed._own[(2,), DType.F32]
    assert (places.starts, len(places.places)) == (1, 2), "turns begin anew, where all ranks can follow"
    assert gcclient.admit() == ()


def test_an_admission_that_is_over_already_is_not_waited_for(shrinking: FakeDaemon) -> None:
    knock(shrinking)
    shrinking.answer = lambda m: EpochChanged(3, MEMBERS[:1], 1) if isinstance(m, Admit) else None
    assert gcclient.admit() == (), "who waited has given up"


def test_a_daemon_that_comes_back_hears_again_who_stands_at_a_point(shrinking: FakeDaemon) -> None:
    knock(shrinking)
    came: list[tuple[int, ...]] = []
    standing = threading.Thread(target=lambda: came.append(gcclient.admit()))
    standing.start()
    shrinking.wait(lambda: len(admits(shrinking)) == 1)
    shrinking.answer = lambda m: EpochChanged(3, MEMBERS, 1) if isinstance(m, Admit) else None
    shrinking.hang_up(-1)
    standing.join(10)
    assert came == [(1,)] and admits(shrinking) == [Admit(1), Admit(1)]


def test_who_waits_and_what_for_is_in_log_and_error(
    shrinking: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcclient.session.SAY_EVERY", 0.02)
    # The wait is over once the daemon's word has come, however long that takes on a busy machine.
    said = "not there yet: b (dead)"
    later = itertools.count(0, 100)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (next(later) if said in caplog.text else 0))
    monkeypatch.setattr("gcclient.session.time", clock)
    session = current()
    session.registered = msgspec.structs.replace(session.job, deadline=0.0)
    knock(shrinking)
    shrinking.answer = lambda m: (
        Waiting("other1 to be let in: not there yet: b (dead)") if isinstance(m, Admit) else None
    )
    with pytest.raises(gcclient.StepTimeout, match=r"waited in vain for other1 to be let in") as caught:
        gcclient.admit()
    assert caught.value.missing == ("other1 to be let in: not there yet: b (dead)",)
    assert "waiting for other1 to be let in" in caplog.text and said in caplog.text


def test_a_job_that_does_not_form_says_what_was_waited_for(daemon: FakeDaemon) -> None:
    late = Fault(b"", "StepTimeout", "job 'unit' did not form", phase="join", missing=("rank 1",))
    daemon.size = 2

    def say() -> None:
        daemon.wait(lambda: any(isinstance(m, Register) for m in daemon.heard[-1]))
        daemon.say(-1, Waiting("ranks [1]; no workers of it have come to b"))
        daemon.say(-1, late)

    daemon.answer = lambda m: Waiting("ranks [0, 1]") if isinstance(m, Register) else None
    threading.Thread(target=say).start()
    with pytest.raises(
        gcclient.StepTimeout, match=r"did not form; waited for ranks .1.; no workers of it have come to b"
    ):
        gcclient.init(0, 2, socket=daemon.socket, job="unit")


def test_it_belongs_between_steps(shrinking: FakeDaemon) -> None:
    shrinking.silent = True
    handle = gcclient.push_pull_async(torch.ones(3), "a")
    with pytest.raises(RuntimeError, match="synchronize handles"):
        gcclient.admit()
    assert not gcclient.poll(handle)


def test_a_point_whose_exchange_is_skipped_lets_nobody_in(shrinking: FakeDaemon) -> None:
    knock(shrinking)
    shrinking.skipping = True
    assert gcclient.admit() == () and admits(shrinking) == []


# --------------------------------------------------------------------------- into a job that runs already
def of(index: int, name: str, *shape: int, dtype: DType = DType.F32) -> Section:
    return Section(index, (TensorSpec(name, shape, int(dtype)),))


FOUND = {
    0: (of(0, "a", 3), of(1, "b", 4)),
    1: (
        of(0, "push_pull.noname.0", 2),
        of(1, "gcclient.admit", 1, dtype=DType.I64),
        of(2, "push_pull.noname.1", 2),
        of(3, "push_pull.noname.any.2", 1024),
    ),
}


@pytest.fixture
def back(daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    """This worker's node came back with epoch 3, after 7 steps of named calls and 9 of unnamed ones."""
    labels = {0: ("calls", ""), 1: ("exact", "none")}
    facts = []
    for key, sections in FOUND.items():
        label, codec = labels[key]
        facts.append(DomainFacts(DeclareDomain(label, key, (0, 1), False, codec), sections, 7 + 2 * key, ((0, 0),)))
        daemon.domains[key] = FakeDomain(daemon.lanes, False)
        for section in sections:
            daemon.domains[key].append(section)
    me, other = MemberInfo("fake", "tcp://x:1", (0,), 3), MemberInfo("other1", "tcp://x:1", (1,))
    registered = Registered(
        b"j" * 16, 3, "fake", (me, other), tuple(daemon.paths[:-1]), PARTITION, 5.0, "static", TICKET, commits=True,
        admissions=1, domains=tuple(facts),
    )  # fmt: skip
    daemon.answer = lambda m: registered if isinstance(m, Register) else None
    gcclient.init(0, 2, socket=daemon.socket, job="unit", on_loss="shrink")
    yield daemon
    gcclient.shutdown()


def declared(daemon: FakeDaemon) -> list[tuple[int, int]]:
    return [(m.domain, m.section.index) for m in daemon.heard[-1] if isinstance(m, DeclareSection)]


def test_what_the_others_declared_is_used_and_steps_go_on(back: FakeDaemon) -> None:
    assert gcclient.root_rank() == 1
    assert gcclient.push_pull(torch.arange(4.0), "b").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert current().domains[0].step == 8 and declared(back) == []
    assert gcclient.push_pull(torch.ones(3), "a").tolist() == [1.0] * 3
    gcclient.push_pull(torch.ones(5), "new")
    assert declared(back) == [(0, 2)] and current().domains[0].step == 10


def test_unnamed_tensors_take_the_places_that_there_are(back: FakeDaemon) -> None:
    for _ in range(2):
        gcclient.push_pull(torch.ones(2))
    assert current().domains[1].step == 11 and declared(back) == []
    gcclient.push_pull(torch.ones(2))
    assert declared(back) == [(1, 4)]
    names = [s.section.tensors[0].name for s in current().domains[1].sections]
    assert names[-1] == "push_pull.noname.3"


def test_shapes_that_share_places_take_those_that_there_are(back: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SHAPES", 1)  # the others count the one that was there before it came, too
    assert gcclient.push_pull(torch.ones(3)).tolist() == [1.0] * 3
    assert declared(back) == []
    gcclient.push_pull(torch.ones(4))
    names = [s.section.tensors[0].name for s in current().domains[1].sections]
    assert declared(back) == [(1, 4)] and names[-1] == "push_pull.noname.any.3"


def test_points_passed_before_it_came_are_not_passed_again(back: FakeDaemon) -> None:
    assert gcclient.admit() == () and declared(back) == [], "the exchange itself has a place already"
    knock(back)
    later = (MEMBERS[0], MemberInfo("other1", "tcp://127.0.0.1:1", (1,), 5))
    back.answer = lambda m: EpochChanged(5, later, 2) if isinstance(m, Admit) else None
    assert gcclient.admit() == (1,) and admits(back) == [Admit(2)]
