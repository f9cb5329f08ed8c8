"""The control machine at its edges: jobs that cannot form, peers that do not fit, workers that come and go wrongly.

What may live here: tests of `gcserver/core/control.py` and `job.py` that need no lanes. What may not: rounds and
restarts, which the simulation plays.
"""

from __future__ import annotations

from dataclasses import replace as dc_replace
from typing import Any

import msgspec
import pytest

from gcproto import messages, wire
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault, Register, Registered
from gcproto.records import replace
from gcproto.wire import FrameType, Header
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.control_config import ControlConfig
from gcserver.core.effects import Count, ReportFault, ReportStep, ReportWaiting, Send
from gcserver.core.events import CodecChoice, DomainOpened, FrameReceived, PeerAdded, Settled, Tick

B = wire.node_id("b")


def resolve(spec: str) -> CodecChoice:
    if spec not in ("none", "topk", "matrix"):
        raise ValueError(f"unknown codec {spec!r}")
    return CodecChoice(spec, 1, 0, spec == "topk", spec == "topk", whole=spec == "matrix")


def machine(lanes: int = 1, codec: str = "none", **more: Any) -> ControlMachine:
    hello = messages.Hello("a", "tcp://a:7000", lanes, 0, 1, "test")
    rules = (messages.Rule("*", codec),)
    return ControlMachine(ControlConfig(hello, 100, rules, 4 << 20, 64 << 10, 60.0, "fail", **more), resolve)


def register(rank: int = 0, world: int = 1, local: int = 0, size: int = 1, label: str = "train") -> Register:
    return Register(label, rank, world, local, size, 1234, b"j" * 16 if rank == 0 else b"")


def said(m: ControlMachine, connection: int, message: Any, now: float = 0.0) -> list[Any]:
    return m.on(ce.WorkerSaid(connection, message), now)


def told(effects: list[Any], connection: int = 1) -> list[Any]:
    return [e.message for e in effects if isinstance(e, ce.Tell) and e.connection == connection]


def formed(lanes: int = 1, scoped: bool = True) -> ControlMachine:
    """One node, one rank, one domain, its section agreed."""
    m = machine(lanes)
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    out = m.on(ce.EpochWon(arbitrate.record), 0.0)
    assert isinstance(told(out)[0], Registered)
    said(m, 1, DeclareDomain("ddp", 0, (0,), scoped))
    out = said(m, 1, DeclareSection(0, Section(0, (TensorSpec("w", (4,), 0),))))
    assert isinstance(told(out)[0], messages.SectionAgreed)
    return m


def hello_from(node: str, incarnation: int, lanes: int = 1, to: int = 0) -> FrameReceived:
    body = messages.encode(messages.Hello(node, f"tcp://{node}:7000", lanes, 0, 1, "test"))
    sender = wire.node_id(node)
    return FrameReceived(Header(FrameType.HELLO, sender=sender, incarnation=incarnation, to_incarnation=to), body=body)


def control_from_b(message: messages.Message, seq: int) -> FrameReceived:
    body = messages.encode(message)
    return FrameReceived(
        Header(FrameType.CONTROL, sender=B, incarnation=7, to_incarnation=100, link_seq=seq), body=body
    )


def control_sent(effects: list[Any]) -> list[Any]:
    decode = messages.Decoder[Any](messages.Control)
    return [decode(e.body) for e in effects if isinstance(e, Send) and e.header.type is FrameType.CONTROL]


def formed_with_b() -> tuple[ControlMachine, messages.EpochDecided]:
    """Nodes a (rank 0) and b (rank 1), the job formed, no domain yet."""
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    said(m, 1, register(0, 2))
    out = m.on(control_from_b(messages.JobJoin("train", 2, messages.MemberInfo("b", "tcp://b:7000", (1,)), 5), 1), 0.0)
    (arbitrate,) = [e for e in out if isinstance(e, ce.Arbitrate)]
    out = m.on(ce.EpochWon(arbitrate.record), 0.0)
    assert control_sent(out) == [arbitrate.record]
    return m, arbitrate.record


def test_members_forget_a_job_together() -> None:
    """What this node's lanes retained another may still ask for."""
    m, record = formed_with_b()
    out = said(m, 1, messages.Unregister())
    assert control_sent(out) == [messages.JobLeft("train", record.job)]
    assert record.job in m.jobs and not any(isinstance(e, ce.ForgetJob) for e in out)
    out = m.on(control_from_b(messages.JobLeft("train", record.job), 2), 0.0)
    assert ce.ForgetJob(record.job) in out and not m.jobs
    again = m.on(control_from_b(messages.JobLeft("train", record.job), 3), 0.0)
    assert control_sent(again) == [messages.JobLeft("train", record.job, 1)], "it came back and asks"
    assert control_sent(m.on(control_from_b(messages.JobLeft("train", record.job, 1), 4), 0.0)) == []


def test_leaving_is_said_again_to_a_peer_that_came_back() -> None:
    m, record = formed_with_b()
    said(m, 1, messages.Unregister())
    out = m.on(hello_from("b", 8, to=100), 1.0)
    assert messages.JobLeft("train", record.job) in control_sent(out)


def test_a_member_that_does_not_know_the_job_says_so() -> None:
    m, record = formed_with_b()
    other = machine()
    other.on(PeerAdded(B, "b"), 0.0)
    other.on(hello_from("b", 7, to=100), 0.0)
    (fault,) = control_sent(other.on(control_from_b(record, 1), 0.0))
    assert fault.kind == "PeerLost" and fault.missing == ("a",) and fault.advice
    assert told(m.on(control_from_b(fault, 2), 0.0)) == [fault]


def test_a_fault_is_passed_on_once() -> None:
    m, record = formed_with_b()
    fault = Fault(record.job, "PeerLost", "gone", missing=("c",), advice="start again")
    assert control_sent(m.on(control_from_b(fault, 2), 0.0)) == [fault]
    assert control_sent(m.on(control_from_b(fault, 3), 0.0)) == []


def test_a_peer_that_is_silent_for_a_lease_ends_the_job() -> None:
    m, _ = formed_with_b()
    assert not told(m.on(Tick(), 29.0))
    (fault,) = told(m.on(Tick(), 31.0))
    assert fault.kind == "PeerLost" and fault.missing == ("b",) and "lease" in fault.message


def test_a_peer_that_lost_its_memory_ends_the_job() -> None:
    m, _ = formed_with_b()
    body = messages.encode(messages.Hello("b", "tcp://b:7000", 1, 0, 2, "test"))
    out = m.on(replace(hello_from("b", 8, to=100), body=body), 1.0)
    assert [f.kind for f in told(out)] == ["PeerLost"]


def test_one_node_forms_a_job_by_itself() -> None:
    m = formed()
    (job,) = m.jobs.values()
    assert job.record.label == "train" and job.record.epoch == 1
    out = m.on(ce.LaneUp(0), 0.0)
    assert [type(e.event) for e in out if isinstance(e, ce.ToLane)] == [DomainOpened, ce.OpenSection]


def test_the_seed_of_rank_0_reaches_every_domain() -> None:
    m = machine()
    out = said(m, 1, replace(register(), seed=77))
    (arbitrate,) = (e for e in out if isinstance(e, ce.Arbitrate))
    assert arbitrate.record.seed == 77
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    out = said(m, 1, messages.DeclareDomain("calls", 0, (0,)))
    opened = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, DomainOpened)]
    assert [e.config.seed for e in opened] == [77]


@pytest.mark.parametrize(
    "bad", [register(rank=2, world=2), register(local=1, size=1, world=2), register(size=3, world=2)]
)
def test_impossible_ranks_are_refused(bad: Register) -> None:
    (fault,) = told(said(machine(), 1, bad))
    assert fault.kind == "JoinRefused" and "ranks start at 0" in fault.message and fault.advice


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


def test_a_drained_daemon_takes_no_jobs_and_says_when_the_last_is_gone() -> None:
    m = formed()
    assert not any(isinstance(e, ce.Drained) for e in m.on(ce.DrainAsked("maintenance"), 0.0))
    (fault,) = told(said(m, 2, register(label="other")), 2)
    assert fault.kind == "Draining" and "maintenance" in fault.message
    out = said(m, 1, messages.Unregister())
    assert [type(e) for e in out if isinstance(e, (ce.ForgetJob, ce.Drained))] == [ce.ForgetJob, ce.Drained]
    assert not m.jobs


def test_another_number_of_lanes_is_refused_on_both_sides() -> None:
    m = machine(lanes=2)
    m.on(PeerAdded(B, "b"), 0.0)
    out = m.on(hello_from("b", 7, lanes=3), 0.0)
    (refusal,) = [e for e in out if isinstance(e, Send)]
    assert refusal.header.type is FrameType.REFUSE and b"set node.lanes" in refusal.body
    (line,) = [e for e in out if isinstance(e, ce.Log)]
    assert "b has 3 lanes and a has 2" in line.text
    assert not m.links[B].up


def test_a_name_used_twice_is_said() -> None:
    m = machine()
    out = m.on(hello_from("a", 999), 0.0)
    assert any(isinstance(e, ce.Log) and "names must differ" in e.text for e in out)


def test_a_peer_nobody_told_us_of_becomes_known_by_its_hello() -> None:
    assert ce.KnowPeer("b", "tcp://b:7000") in machine().on(hello_from("b", 7), 0.0)


def test_a_worker_without_a_job_is_told_so() -> None:
    (fault,) = told(said(machine(), 1, messages.Unregister()))
    assert fault.kind == "NotRegistered" and "init()" in fault.message


def test_reattaching_to_a_daemon_without_memory() -> None:
    (fault,) = told(said(machine(), 1, messages.Reattach(b"j" * 16, 0, 1)))
    assert fault.kind == "PeerLost" and "last checkpoint" in fault.advice


def test_a_worker_that_vanishes_ends_the_job() -> None:
    m = formed()
    m.on(ce.WorkerGone(1), 0.0)
    assert not m.jobs, "nobody is left to tell"


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (DeclareDomain("ddp", 0, (0,), False), "declares process group"),
        (DeclareDomain("tp", 1, (0, 1)), "within 0..0"),
        (DeclareDomain("tp", 1, (0,), codec="zip"), "unknown codec 'zip'"),
        (DeclareDomain("ddp", 0, (0,), True, whole=True), "declares process group"),
        (DeclareDomain("tp", 1, (0,), codec="matrix"), "matrix takes whole matrices, and blocks of 'tp' may cut them"),
        (DeclareSection(9, Section(0, (TensorSpec("w", (4,), 0),))), "not in"),
        (DeclareSection(0, Section(1, ())), "holds 1 to"),
        (DeclareSection(0, Section(0, (TensorSpec("w", (5,), 0),))), "shape of tensor 0 differs"),
    ],
)
def test_wrong_declarations_end_the_job_with_a_reason(message: Any, part: str) -> None:
    (fault,) = told(said(formed(), 1, message))
    assert isinstance(fault, Fault) and part in fault.message and fault.advice


def test_steps_settle_in_order_when_all_lanes_are_done() -> None:
    m = formed(lanes=2)
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]

    def report(lane: int, step: int, nonfinite: bool = False) -> list[tuple[int, bool]]:
        out = m.on(ce.LaneSaid(lane, ReportStep(domain, step, nonfinite, 0, 0)), 0.0)
        logged = [e for e in out if isinstance(e, ce.LogSettled)]
        sent = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, Settled)]
        assert [(e.step, e.void) for e in logged] == [(e.step, e.void) for e in sent]
        return [(e.step, e.void) for e in logged]

    assert report(0, 1) == []
    assert report(0, 2) == []
    assert report(1, 2, nonfinite=True) == []
    assert report(1, 1) == [(1, False), (2, True)]
    assert report(1, 1) == [], "an old report, again"


def test_the_deadline_names_step_phase_and_who_is_missing() -> None:
    m = formed()
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 7, 1.0, "exchange", ("b",))), 2.0)
    assert told(m.on(Tick(), 60.0)) == []
    (fault,) = told(m.on(Tick(), 61.5))
    assert (fault.kind, fault.step, fault.phase, fault.missing) == ("StepTimeout", 7, "exchange", ("b",))
    assert fault.elapsed == pytest.approx(60.5) and fault.epoch == 1 and fault.advice


def test_a_lanes_fault_reaches_the_worker_once() -> None:
    m = formed()
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    fault = ReportFault(domain, "CorruptFrame", "damaged twice", 3, "exchange", ("b",), "look")
    assert len(told(m.on(ce.LaneSaid(0, fault), 0.0))) == 1
    assert told(m.on(ce.LaneSaid(0, fault), 0.0)) == []


def test_set_codec_answers_every_request_once() -> None:
    m = formed()
    (no_job,) = m.on(ce.SetCodec(1, "other", "*", "none"), 0.0)
    assert no_job == ce.AnswerRequest(1, error="no such job: 'other'; jobs here: train")
    (no_codec,) = m.on(ce.SetCodec(2, "train", "*", "zip"), 0.0)
    assert no_codec == ce.AnswerRequest(2, error="unknown codec 'zip'")
    assert not [e for e in m.on(ce.SetCodec(3, "train", "w*", "topk"), 0.0) if isinstance(e, ce.AnswerRequest)]
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    out = m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 1, 0)), 0.0)
    (answer,) = [e for e in out if isinstance(e, ce.AnswerRequest)]
    assert (answer.request, answer.plan, answer.step, answer.error) == (3, 1, 3, "")


def test_a_frame_that_cannot_be_read_is_counted() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    bad = replace(hello_from("b", 7), body=b"\xc1noise")
    assert Count("frames_unusable", B) in m.on(bad, 0.0)
    assert not m.links[B].up


LARGE = Section(0, (TensorSpec("b", (300,), 0), TensorSpec("w", (300, 300), 0)))


def declared(whole: bool, scoped: bool = True, rules: str = "none") -> tuple[ControlMachine, list[Any]]:
    """One node, one rank, one domain with a large matrix; what the machine said to its section."""
    m = machine(codec=rules)
    (arbitrate,) = [e for e in said(m, 1, register()) if isinstance(e, ce.Arbitrate)]
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    said(m, 1, DeclareDomain("ddp", 0, (0,), scoped, "", whole))
    return m, said(m, 1, DeclareSection(0, LARGE))


def test_a_plan_of_whole_matrices_is_refused_where_blocks_may_cut_them() -> None:
    m, _ = declared(whole=False)
    (answer,) = answers(m.on(ce.SetCodec(1, "train", "w*", "matrix"), 0.0))
    assert "a: matrix takes whole matrices, and blocks of 'ddp' may cut 'w'" in answer.error
    assert "whole=True" in answer.error
    assert not answers(m.on(ce.SetCodec(2, "train", "other*", "matrix"), 0.0)), "no tensor is meant"
    for m, _ in (declared(whole=True), declared(whole=False, scoped=False)):
        assert not answers(m.on(ce.SetCodec(1, "train", "*", "matrix"), 0.0)), "the latter go dense"


def test_a_section_that_the_plan_in_force_would_cut_is_refused() -> None:
    _, out = declared(whole=False, rules="matrix")
    (fault,) = told(out)
    assert isinstance(fault, Fault) and fault.kind == "CodecError"
    assert "rank 0: matrix takes whole matrices, and blocks of 'ddp' may cut 'b'" in fault.message
    assert "whole=True" in fault.advice
    for _, out in (declared(whole=True, rules="matrix"), declared(whole=False, scoped=False, rules="matrix")):
        assert isinstance(told(out)[0], messages.SectionAgreed)


def test_a_restarted_supervisor_lays_a_domain_out_as_before() -> None:
    m, out = declared(whole=True)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(memory, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    opened = [e.event for e in again.on(ce.LaneUp(0), 0.0) if isinstance(e, ce.ToLane)]
    (config,) = [e.config for e in opened if isinstance(e, DomainOpened)]
    assert config.whole and config == m.jobs[memory.record.job].domains[0].config


def test_members_agree_on_what_is_whole() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    theirs = messages.SectionList(record.job, 0, DeclareDomain("ddp", 0, (0, 1), True, "", True), LARGE, 1)
    said(m, 1, DeclareSection(0, LARGE))
    (fault,) = told(m.on(control_from_b(theirs, 2), 0.0))
    assert "process groups differ" in fault.message and "whole=True" in fault.message


def domain_of(m: ControlMachine) -> tuple[bytes, int]:
    ((job, key),) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    return job, key


def answers(effects: list[Any]) -> list[ce.AnswerRequest]:
    return [e for e in effects if isinstance(e, ce.AnswerRequest)]


def test_a_wait_that_is_over_ends_no_job() -> None:
    m = formed(lanes=2)
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 1, 1.0, "exchange", ("b",))), 2.0)
    for lane in (0, 1):
        m.on(ce.LaneSaid(lane, ReportStep(domain, 1, False, 0, 0)), 3.0)
    assert told(m.on(Tick(), 90.0)) == []
    m.on(ce.LaneSaid(1, ReportWaiting(domain, 2, 90.0, "exchange", ("b",))), 91.0)
    m.on(ce.LaneUp(1), 92.0)
    assert told(m.on(Tick(), 200.0)) == [], "a lane that came back says anew what it waits for"


def test_a_lost_peer_is_named_with_the_work_it_held_up() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 0, 0)), 1.0)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 2, 1.0, "push", ("b",))), 2.0)
    (fault,) = told(m.on(Tick(), 31.0))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("PeerLost", 3, 2, "push", 1)


def test_a_lost_worker_is_named_with_the_step_after_the_last() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 0, 0)), 1.0)
    fault = next(f for f in control_sent(m.on(ce.WorkerGone(1), 2.0)) if isinstance(f, Fault))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("WorkerLost", 3, 2, "push", 1)


def test_the_number_of_a_plan_that_cannot_run_is_dead() -> None:
    m, record = formed_with_b()
    m.on(ce.SetCodec(1, "train", "*", "topk"), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "no topk here"), 2), 0.0)
    assert answers(out) == [ce.AnswerRequest(1, error="b: no topk here")]
    assert messages.PlanReady(record.job, 1, "b: no topk here") in control_sent(out), "all hear of it"
    out = m.on(ce.SetCodec(2, "train", "*", "none"), 0.0)
    (text,) = [x for x in control_sent(out) if isinstance(x, messages.PlanText)]
    assert text.version == 2
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(dc_replace(memory, plans=()), ()), 0.0)
    assert again.jobs[record.job].numbered == 2


def test_who_asked_at_another_node_hears_that_a_plan_cannot_run() -> None:
    m, record = follower()
    out = m.on(ce.SetCodec(4, "train", "*", "topk"), 0.0)
    (wish,) = control_sent(out)
    m.on(control_from_b(messages.PlanText(record.job, 1, wish.request, wish.rules), 3), 0.0)
    out = m.on(control_from_b(messages.PlanReady(record.job, 1, "b: no topk here"), 4), 0.0)
    assert answers(out) == [ce.AnswerRequest(4, error="b: no topk here")]
    assert 1 not in m.jobs[record.job].plans


def test_a_plan_answers_all_who_asked_for_it_or_one_before() -> None:
    m = formed()
    m.on(ce.SetCodec(1, "train", "w", "topk"), 0.0)
    m.on(ce.SetCodec(2, "train", "v", "topk"), 0.0)
    out = m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 2, 0)), 0.0)
    assert [(a.request, a.plan, a.error) for a in answers(out)] == [(1, 2, ""), (2, 2, "")]


def test_an_orderly_end_answers_what_is_open() -> None:
    m = formed()
    m.on(ce.SetCodec(1, "train", "*", "topk"), 0.0)
    (answer,) = answers(said(m, 1, messages.Unregister()))
    assert answer.request == 1 and "ended" in answer.error


@pytest.mark.parametrize(
    ("change", "part"), [({"number": b"short"}, "16 bytes, got 5"), ({"on_loss": "shrink"}, "later release")]
)
def test_registrations_this_release_cannot_serve_are_refused(change: dict[str, Any], part: str) -> None:
    (fault,) = told(said(machine(), 1, msgspec.structs.replace(register(), **change)))
    assert fault.kind == "JoinRefused" and part in fault.message


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_domain_number_fits_the_frame_header(number: int) -> None:
    (fault,) = told(said(formed(), 1, DeclareDomain("tp", number, (0,))))
    assert f"0..{2**32 - 1}" in fault.message


def test_a_peers_impossible_section_ends_the_job() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 0, (0, 1), True))
    (fault,) = told(m.on(control_from_b(messages.SectionOffer(record.job, 0, -1, 5), 2), 0.0))
    assert "sections start at 0" in fault.message
    m, record = formed_with_b()
    declared = DeclareDomain("ddp", 0, (0, 1), True)
    said(m, 1, declared)
    theirs = messages.SectionList(record.job, 0, declared, Section(0, (TensorSpec("w", (4,), 250),)), 1)
    (fault,) = told(m.on(control_from_b(theirs, 2), 0.0))
    assert "unknown dtype code 250" in fault.message


def gathered() -> tuple[ControlMachine, int, messages.EpochDecided]:
    """Node a with rank 1, which waits for b; the nonce of its gathering; the record b would send."""
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    (join,) = control_sent(said(m, 1, register(1, 2)))
    members = (messages.MemberInfo("b", "tcp://b:7000", (0,)), join.member)
    rules = (messages.Rule("*", "none"),)
    return m, join.nonce, messages.EpochDecided("train", b"j" * 16, 1, 2, members, (5, join.nonce), rules)


def follower() -> tuple[ControlMachine, messages.EpochDecided]:
    m, _, record = gathered()
    assert isinstance(told(m.on(control_from_b(record, 1), 0.0))[0], Registered)
    return m, record


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        ({"rules": (messages.Rule("*", "zip"),)}, "CodecError", "unknown codec 'zip'"),
        ({"world_size": 3}, "JoinRefused", "does not fit together"),
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
