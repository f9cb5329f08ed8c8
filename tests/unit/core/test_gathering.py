"""Jobs that cannot form: impossible ranks, other world sizes, records that cannot be followed.

What may live here: tests of `gcserver/core/gathering.py`. What may not: jobs that have formed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gcproto import messages
from gcproto.messages import MAX_RANKS, Register, Registered
from gcserver.core.control_events import Arbitrate, EpochWon
from gcserver.core.effects import Count
from gcserver.core.events import PeerAdded, Tick
from gcserver.core.gathering import MAX_JOINS
from tests.unit.core.control_machine import (
    B,
    control_from_b,
    control_sent,
    formed_with_b,
    gathered,
    hello_from,
    machine,
    register,
    said,
    told,
)


@pytest.mark.parametrize(
    "bad", [register(rank=2, world=2), register(local=1, size=1, world=2), register(size=3, world=2)]
)
def test_impossible_ranks_are_refused(bad: Register) -> None:
    (fault,) = told(said(machine(), 1, bad))
    assert fault.kind == "JoinRefused" and "ranks start at 0" in fault.message and fault.advice


@pytest.mark.parametrize("size", [1, 1 << 57])
def test_a_world_of_more_ranks_than_a_job_has_is_refused_before_anything_is_made_of_it(size: int) -> None:
    m = machine()
    (fault,) = told(said(m, 1, register(0, 1 << 57, 0, size)))
    assert fault.kind == "JoinRefused" and f"at most {MAX_RANKS}" in fault.message
    assert not m.gatherings and told(m.on(Tick(), 30.0)) == []
    said(m, 1, register(0, MAX_RANKS))
    (waiting,) = told(m.on(Tick(), 3.0))
    assert "31, 32] and 65503 more of job 'train'" in waiting.what


def test_joins_of_jobs_that_never_form_are_bounded_for_each_node() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    member = messages.MemberInfo("b", "tcp://b:7000", (1,))
    for i in range(MAX_JOINS):
        assert m.on(control_from_b(messages.JobJoin(f"j{i}", 2, member, 5), i + 1), 0.0) == []
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 5), MAX_JOINS + 1), 0.0)
    assert Count("joins_refused", B) in out and "train" not in m.formation.joins
    (refusal,) = control_sent(out)
    assert refusal.gatherings == (("b", 5),) and f"keeps {MAX_JOINS} of a node" in refusal.reason
    m.on(control_from_b(messages.JobLeft("j0", b"", 5), MAX_JOINS + 2), 0.0)
    said(m, 1, register(0, 2))
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 6), MAX_JOINS + 3), 0.0)
    assert [e.record.label for e in out if isinstance(e, Arbitrate)] == ["train"]


def test_a_join_numbered_ahead_of_all_clocks_does_not_shut_out_later_ones() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    m.on(Tick(1000), 0.0)
    member = messages.MemberInfo("b", "tcp://b:7000", (1,))
    assert m.on(control_from_b(messages.JobJoin("train", 2, member, 1 << 60), 1), 0.0) == [Count("lives_refused", B)]
    alien = messages.MemberInfo("a", "tcp://a:7000", (0,))
    m.on(control_from_b(messages.EpochDecided("train", b"x" * 16, 1, 2, (alien, member), (5, 1 << 60)), 2), 0.0)
    assert set(m.formation.used.values()) == {5, 1000}
    said(m, 1, register(0, 2))
    m.on(Tick(2000), 0.0)
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 1500), 3), 0.0)
    assert [e.record.label for e in out if isinstance(e, Arbitrate)] == ["train"]


def test_a_node_waits_with_no_more_ranks_than_one_job_has() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    for seq, (label, ranks) in enumerate((("j", 40_000), ("k", 30_000), ("j", 20_000), ("k", 30_000)), 1):
        member = messages.MemberInfo("b", "tcp://b:7000", tuple(range(ranks)))
        m.on(control_from_b(messages.JobJoin(label, MAX_RANKS, member, 4 + seq), seq), 0.0)
        assert ("k" in m.formation.joins) == (seq == 4)


def test_the_same_local_rank_twice_refuses_the_first() -> None:
    m = machine()
    said(m, 1, register(0, 2, 0, 2))
    out = said(m, 2, register(0, 2, 0, 2))
    (fault,) = told(out, 1)
    assert fault.kind == "JoinRefused" and "GC_JOB" in fault.message


def test_ranks_that_do_not_make_the_world_are_refused() -> None:
    m = machine()
    said(m, 1, register(0, 2, 0, 2))
    out = said(m, 2, Register("train", 0, 2, 1, 2, 1, b"j" * 16))
    assert [f.kind for f in told(out, 1) + told(out, 2)] == ["JoinRefused"] * 2


def test_who_waits_is_told_what_for() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    said(m, 1, register(0, 2))
    (waiting,) = told(m.on(Tick(), 3.0))
    assert "ranks [1] of job 'train'" in waiting.what and "b (no answer)" in waiting.what


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"number": b"short"}, "16 bytes, got 5"),
        ({"on_loss": "shrink"}, "needs etcd"),
        ({"on_loss": "panic"}, "expected one of fail, skip, shrink"),
        ({"plan": "clever"}, "plan='clever': expected one of static, auto"),
        ({"quality": "best"}, "quality='best': expected one of safe"),
        ({"controller": "pid"}, "unknown controller 'pid'"),
    ],
)
def test_registrations_this_release_cannot_serve_are_refused(change: dict[str, Any], part: str) -> None:
    (fault,) = told(said(machine(), 1, msgspec.structs.replace(register(), **change)))
    assert fault.kind == "JoinRefused" and part in fault.message


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        ({"rules": (messages.Rule("*", "zip"),)}, "CodecError", "unknown codec 'zip'"),
        ({"controller": "pid"}, "JoinRefused", "a cannot steer job 'train' as it should be: unknown controller 'pid'"),
        ({"mode": "clever"}, "JoinRefused", "expected one of static, auto"),
        ({"quality": "best"}, "JoinRefused", "expected one of safe, balanced, fast"),
        ({"world_size": 3}, "JoinRefused", "does not fit together"),
        ({"epoch": 2, "on_loss": "shrink"}, "JoinRefused", "says who left at the beginning of 0 after the first"),
        ({"epoch": 2, "lost": ((),)}, "JoinRefused", "of epoch 2, and the first loss ends that job"),
        ({"job": b"j"}, "JoinRefused", "number of 1 bytes"),
        ({"partition_bytes": 1000}, "JoinRefused", "multiple of 4096"),
    ],
)
def test_a_record_that_cannot_be_followed_is_refused(change: dict[str, Any], kind: str, part: str) -> None:
    m, _, record = gathered()
    out = m.on(control_from_b(msgspec.structs.replace(record, **change), 1), 0.0)
    (fault,) = told(out)
    assert fault.kind == kind and part in fault.message and fault.advice
    assert [f.kind for f in control_sent(out)] == [kind] and not m.jobs and not m.gatherings


def test_a_job_whose_rules_its_own_node_cannot_run_does_not_form() -> None:
    """The configuration was read when the daemon started; a third party's codec may fail later."""
    m = machine(codec="zip")
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 2))
    out = m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (1,)), 5), 1), 0.0)
    (fault,) = told(out)
    assert fault.kind == "CodecError" and "unknown codec 'zip'" in fault.message and "same codecs" in fault.advice
    assert not [e for e in out if isinstance(e, Arbitrate)] and not m.gatherings
    (refusal,) = control_sent(out)
    assert (refusal.kind, refusal.gatherings) == ("CodecError", (("a", 101), ("b", 5)))
    other, nonce, _ = gathered()
    (fault,) = told(other.on(control_from_b(msgspec.structs.replace(refusal, gatherings=(("a", nonce),)), 1), 0.0))
    assert fault.kind == "CodecError" and "same codecs" in fault.advice


def test_a_record_with_too_few_nonces_is_refused() -> None:
    m, nonce, record = gathered()
    out = m.on(control_from_b(msgspec.structs.replace(record, nonces=(nonce,)), 1), 0.0)
    assert "2 members, 1 nonces" in control_sent(out)[0].message and not m.jobs


def test_a_refused_gathering_is_told_to_the_other_nodes() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 2))
    out = m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (0,)), 5), 1), 0.0)
    assert [f.kind for f in told(out)] == ["JoinRefused"] and not m.formation.joins
    (refusal,) = control_sent(out)
    assert ("b", 5) in refusal.gatherings and "do not make a world" in refusal.reason
    other, nonce, _ = gathered()
    late = messages.JoinRefusal("train", (("a", nonce - 1),), "ranks")
    assert told(other.on(control_from_b(late, 1), 0.0)) == [], "an earlier gathering"
    (fault,) = told(other.on(control_from_b(messages.JoinRefusal("train", (("a", nonce),), "ranks"), 2), 0.0))
    assert (
        fault.kind == "JoinRefused"
        and fault.message == "b: ranks"
        and not other.gatherings
        and not other.formation.joins
    )


def test_another_world_size_elsewhere_is_named_to_who_waits() -> None:
    m, _, _ = gathered()
    m.on(control_from_b(messages.JobJoin("train", 4, messages.MemberInfo("b", "tcp://b:7000", (0,)), 5), 1), 0.0)
    (waiting,) = told(m.on(Tick(), 3.0))
    assert "ranks [0]" in waiting.what and "WORLD_SIZE differs: 2 here, 4 on b" in waiting.what


def test_a_job_that_does_not_form_within_its_deadline_names_who_is_missing() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 3))
    assert m.formation.missing(m.gatherings["train"]) == (1, 2)
    assert not [f for f in told(m.on(Tick(), 60.0)) if isinstance(f, messages.Fault)]
    out = m.on(Tick(), 60.5)
    (fault,) = told(out)
    assert (fault.kind, fault.phase, fault.missing) == ("StepTimeout", "join", ("rank 1", "rank 2"))
    assert fault.elapsed == 60.5 and "'train' did not form within its deadline of 60 s" in fault.message
    assert [type(x) for x in control_sent(out)] == [messages.JobLeft], "nobody counts on this node any more"
    assert not m.gatherings


def test_who_has_heard_of_all_ranks_waits_for_the_node_of_rank_0() -> None:
    """Which may not have heard of all of them."""
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(1, 2))
    m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (0,)), 5), 1), 0.0)
    assert m.formation.missing(m.gatherings["train"]) == (0,)
    (fault,) = (f for f in told(m.on(Tick(), 60.5)) if isinstance(f, messages.Fault))
    assert (fault.kind, fault.missing) == ("StepTimeout", ("rank 0",))


def test_the_node_of_rank_0_waits_for_the_arbiter_once_all_have_joined() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 2))
    m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (1,)), 5), 1), 0.0)
    assert m.formation.missing(m.gatherings["train"]) == ()
    (fault,) = (f for f in told(m.on(Tick(), 60.5)) if isinstance(f, messages.Fault))
    assert (fault.kind, fault.missing) == ("StepTimeout", ("arbiter",))


def test_a_worker_may_say_a_deadline_of_its_own() -> None:
    m = machine()
    said(m, 1, msgspec.structs.replace(register(0, 2, 0, 2), deadline=5.0))
    (fault,) = told(m.on(Tick(), 6.0))
    assert (fault.kind, fault.missing) == ("StepTimeout", ("local rank 1",))


def test_what_is_left_of_an_earlier_run_never_enters_a_later_one() -> None:
    m, _ = formed_with_b()
    member = messages.MemberInfo("b", "tcp://b:7000", (1,))
    m.on(control_from_b(messages.JobJoin("train", 2, member, 5), 2), 0.0)
    again = said(m, 2, register(0, 2))
    assert not any(isinstance(e, Arbitrate) for e in again), "that join made the first run"
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 6), 3), 0.0)
    assert [e.record.nonces[1] for e in out if isinstance(e, Arbitrate)] == [6]


def test_a_worker_with_another_token_is_refused_and_disturbs_nobody() -> None:
    m = machine()
    said(m, 1, with_token(register(0, 2, 0, 2), b"ours"))
    for wrong in (b"theirs", b""):
        out = said(m, 2, with_token(register(0, 2, 0, 2), wrong))
        (fault,) = told(out, 2)
        assert fault.kind == "NotAuthorised" and "'train'" in fault.message and "GC_JOB_TOKEN" in fault.advice
        assert Count("tokens_refused") in out and told(out, 1) == []
    out = said(m, 3, with_token(Register("train", 1, 2, 1, 2, 1), b"ours"))
    (arbitrate,) = [e for e in out if isinstance(e, Arbitrate)]
    assert isinstance(told(m.on(EpochWon(arbitrate.record), 0.0), 1)[0], Registered)


def test_a_node_with_another_token_does_not_join() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    out = said(m, 1, with_token(register(0, 2), b"ours"))
    assert [join.token for join in control_sent(out)] == [b"ours"]
    member = messages.MemberInfo("b", "tcp://b:7000", (1,))
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 5, b"theirs"), 1), 0.0)
    (refusal,) = control_sent(out)
    assert refusal.kind == "NotAuthorised" and refusal.gatherings == (("b", 5),)
    assert Count("tokens_refused", B) in out and told(out) == [] and list(m.formation.joins["train"]) == ["a"]
    out = m.on(control_from_b(messages.JobJoin("train", 2, member, 6, b"ours"), 2), 0.0)
    assert [e for e in out if isinstance(e, Arbitrate)]


def test_those_whose_token_is_refused_elsewhere_are_told() -> None:
    m, nonce, _ = gathered()
    refusal = messages.JoinRefusal("train", (("a", nonce),), "another token", "NotAuthorised")
    (fault,) = told(m.on(control_from_b(refusal, 1), 0.0))
    assert fault.kind == "NotAuthorised" and "GC_JOB_TOKEN" in fault.advice and not m.gatherings


def test_a_node_joins_for_itself_only() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    join = messages.JobJoin("train", 2, messages.MemberInfo("c", "tcp://c:7000", (1,)), 5)
    out = m.on(control_from_b(join, 1), 0.0)
    assert Count("frames_forged", B) in out and not m.formation.joins


def with_token(m: Register, token: bytes) -> Register:
    return msgspec.structs.replace(m, token=token)
