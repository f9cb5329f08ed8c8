"""What an operator says of who makes a job's plans, as every member comes to know it.

What may live here: tests of `plan_modes.py` and of where what was said goes. What may not: what a planner makes of
it (`runtime/test_planning_modes.py`), plans themselves (`test_job_plans.py`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gcproto.messages import MemberInfo, PlanMode
from gcserver.core import admission, entering, job_plans, plan_modes
from gcserver.core import control_events as ce
from gcserver.core.job import Job
from gcserver.core.restoring import damage
from tests.unit.core.control_machine import control_sent, formed_with_b, resolve
from tests.unit.core.members import JOB, Members

SAFE = PlanMode(JOB, "auto", "safe", 0)


def say(w: Members, mode: str = "auto", quality: str = "safe", at: str = "a", anew: bool = True) -> None:
    w.did(at, plan_modes.say(w[at], mode, quality, anew))


def test_what_is_said_at_the_first_member_reaches_all_and_outlives_it() -> None:
    w = Members("abc")
    say(w)
    w.deliver()
    assert [job.said for job in w.jobs.values()] == [SAFE] * 3
    for name in "abc":
        assert [e.memory.said for e in w.out[name] if isinstance(e, ce.SaveJob)] == [SAFE]
    w.die("a")
    record = w.decided("b")
    for name in "bc":
        w.hear(name, record)
    assert (w["b"].first, w["b"].said) == ("b", SAFE)
    say(w, "static", "", at="b")
    w.deliver()
    assert w["c"].said == PlanMode(JOB, "static", "", w["b"].numbered, 2), "whoever is the first has the word"


def test_who_was_away_hears_it_when_it_is_back() -> None:
    w = Members("abc")
    say(w)
    w.restart("b")
    w.deliver()
    assert w["b"].said == SAFE
    w.restart("a")
    assert w["a"].said == SAFE, "it is part of what is saved"


@pytest.mark.parametrize("heard", ["b", "c"])
def test_what_reached_one_member_before_the_first_was_lost_reaches_all(heard: str) -> None:
    w = Members("abc")
    say(w)
    w.deliver("a" + heard)
    w.die("a")
    record = w.decided("b")
    assert [w[name].said for name in "bc"].count(None) == 1
    for name in "bc":
        w.hear(name, record)
    w.deliver()
    assert [w[name].said for name in "bc"] == [SAFE, SAFE]


def test_of_what_was_said_the_newest_counts_in_whichever_order_it_comes() -> None:
    w = Members("ab")
    newer = PlanMode(JOB, "static", "", 0, 2)
    for said, kept in ((newer, newer), (SAFE, newer), (newer, newer)):
        w.say("a", "b", said)
        assert w["b"].said == kept
    assert len([e for e in w.out["b"] if isinstance(e, ce.SaveJob)]) == 1
    say(w, quality="fast")
    say(w, quality="safe")
    w.deliver()
    assert w["a"].said == PlanMode(JOB, "auto", "safe", 0, 2) and w["b"].said == newer, "as new, not newer"
    say(w, quality="fast")
    w.deliver()
    assert w["b"].said == PlanMode(JOB, "auto", "fast", 0, 3)


def test_the_quality_alone_does_not_give_the_planner_rules_that_are_on_their_way() -> None:
    w = Members("ab")
    w.ask("a", 1)
    say(w, quality="fast", anew=False)
    assert w["a"].said == PlanMode(JOB, "auto", "fast", 0)
    say(w)
    say(w, quality="balanced", anew=False)
    assert w["a"].said == PlanMode(JOB, "auto", "balanced", 1, 3), "since the mode was said"


def test_another_controller_makes_rules_no_newer() -> None:
    w = Members("ab")
    w.ask("a", 1)
    w.deliver()
    say(w)
    w.did("b", job_plans.set_plan(w["b"], 102, ce.SetPlan(2, "train", (), False, "dc2-da2")))
    w.deliver()
    assert w["a"].proposal == 2 and w["a"].said == w["b"].said == PlanMode(JOB, "auto", "safe", 2)
    w.ask("b", 3)
    w.deliver()
    assert w["a"].proposal == 3 and w["b"].said == PlanMode(JOB, "auto", "safe", 2)


def test_numbers_of_wishes_that_waited_when_the_mode_was_said_are_not_given_to_others() -> None:
    w = Members("ab")
    for request in (1, 2, 3):
        w.ask("a", request)
    say(w)
    assert (w["a"].numbered, w["a"].said) == (1, PlanMode(JOB, "auto", "safe", 3))
    w.restart("a")
    w.deliver()
    w.ask("b", 4)
    w.deliver()
    assert w["b"].proposal == 4


@pytest.mark.parametrize("bad", [PlanMode(JOB, "best"), PlanMode(JOB, "auto", "poor"), PlanMode(JOB, "", "safe")])
def test_what_is_no_word_for_it_changes_nothing_anywhere(bad: PlanMode) -> None:
    w = Members("ab")
    w.say("a", "b", bad)
    assert w["b"].said is None and not [e for e in w.out["b"] if isinstance(e, ce.SaveJob)]
    assert [e.text.split(": ")[:2] for e in w.out["b"] if isinstance(e, ce.Log)] == [
        ["job train", "who makes its plans stays as it was"]
    ]
    memory = w["b"].save().memory
    assert not damage(memory, (), "b") and "plans" in damage(replace(memory, said=bad), (), "b")
    state = msgspec.structs.replace(admission.state_for(w["a"], w["a"].record.members[1]), said=bad)
    assert entering._unable(Job(w["b"].record, "b", 1, resolve), state)


def test_what_the_next_first_member_says_counts_before_others_know_of_the_epoch() -> None:
    w = Members("abc")
    w.die("a")
    record = w.decided("b")
    w.hear("b", record)
    say(w, at="b")
    said = w["b"].said
    w.deliver("bc")
    w.deliver()
    assert said is not None and w["c"].said == said


def test_plans_that_are_being_prepared_or_waited_for_were_there_before() -> None:
    w = Members("ab")
    w.ask("a", 1)
    w.ask("a", 2)
    assert list(w["a"].preparing) == [1] and len(w["a"].queue) == 1
    say(w)
    w.ask("a", 3)
    w.deliver()
    assert w["b"].said == msgspec.structs.replace(SAFE, since=2)
    assert w["a"].proposal == 3


def test_who_comes_in_is_told() -> None:
    w = Members("abc")
    say(w)
    w.deliver()
    record = w["b"].record
    back = MemberInfo("c", "tcp://c:7000", (2,), 3)
    states = [admission.state_for(w[name], back) for name in "ab"]
    assert [state.said for state in states] == [SAFE, SAFE]
    newer = msgspec.structs.replace(SAFE, quality="fast", number=2)
    late = msgspec.structs.replace(states[1], said=newer)
    unknowing = msgspec.structs.replace(states[1], said=None)
    for said, expected in (([states[0], late], newer), ([unknowing, states[0]], SAFE), ([unknowing], None)):
        job = Job(record, "c", 1, resolve)
        admission.fill(job, entering._merged(said))
        assert job.said == expected


def test_a_daemon_says_it_of_a_job_that_it_has() -> None:
    m, record = formed_with_b()
    out = m.on(ce.SayMode(record.job, "auto", "safe", True), 0.0)
    said = PlanMode(record.job, "auto", "safe", 0)
    assert [x for x in control_sent(out) if isinstance(x, PlanMode)] == [said]
    assert [e.memory.said for e in out if isinstance(e, ce.SaveJob)] == [said]
    assert m.on(ce.SayMode(b"x" * 16, "auto", "safe", True), 0.0) == []
