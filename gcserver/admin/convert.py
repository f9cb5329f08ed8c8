"""Between the values of `source.py`, the messages of `proto/admin.proto` and plain JSON.

What may live here: field by field translation. What may not: gRPC calls, tables, anything that asks a daemon.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gcproto import admin_pb2 as pb
from gcproto.spans import Kind, Span
from gcserver.admin import source
from gcserver.admin.spans import TraceContext, TracedNode, TracePart

M = TypeVar("M", bound=Message)


def status(s: source.NodeStatus) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        version=s.version,
        protocol_version=s.protocol_version,
        node=s.node,
        incarnation=s.incarnation,
        uptime_seconds=s.uptime,
        listen=s.listen,
        advertise=s.advertise,
        state=_name("NODE_STATE", s.state),
        reason=s.reason,
        lanes=[
            pb.LaneStatus(
                index=lane.index,
                pid=lane.pid,
                incarnation=lane.incarnation,
                cores=lane.cores,
                state=lane.state,
                restarts=lane.restarts,
                bytes_in=lane.bytes_in,
                bytes_out=lane.bytes_out,
                rounds=lane.rounds,
            )
            for lane in s.lanes
        ],
        arena_bytes=s.arena_bytes,
        errors=s.errors,
        planning_cpu_seconds=s.planning,
        applicants=[pb.Applicant(node=a.node, job=a.job, since_seconds=a.since, reason=a.reason) for a in s.applicants],
    )


def peer(p: source.PeerStatus) -> pb.Peer:
    return pb.Peer(
        name=p.name,
        address=p.address,
        state=_name("PEER_STATE", p.state),
        reason=p.reason,
        incarnation=p.incarnation,
        last_heard_seconds=p.last_heard,
        rtt_seconds=p.rtt,
        bytes_in=p.bytes_in,
        bytes_out=p.bytes_out,
        frames_resent=p.frames_resent,
        frames_corrupt=p.frames_corrupt,
        encrypted=p.encrypted,
        since_seconds=p.since,
        lanes=[
            pb.PeerLane(
                lane=lane.lane, state=_name("PEER_STATE", lane.state), reason=lane.reason, since_seconds=lane.since
            )
            for lane in p.lanes
        ],
    )


def job(j: source.JobStatus) -> pb.Job:
    return pb.Job(
        label=j.label,
        id=j.id,
        state=_name("JOB_STATE", j.state),
        reason=j.reason,
        epoch=j.epoch,
        world_size=j.world_size,
        members=[pb.Member(node=m.node, ranks=m.ranks) for m in j.members],
        step=j.step,
        plan_version=j.plan_version,
        on_loss=j.on_loss,
        deadline_seconds=j.deadline,
        domains=[_domain(d) for d in j.domains],
        waiting_for=[_waiting(w) for w in j.waiting_for],
    )


def _domain(d: source.DomainStatus) -> pb.Domain:
    return pb.Domain(
        id=d.id,
        label=d.label,
        steps_settled=d.steps_settled,
        steps_void=d.steps_void,
        tensors=d.tensors,
        elements=d.elements,
        codec=d.codec,
        waiting_for=[_waiting(w) for w in d.waiting_for],
    )


def _waiting(w: source.WaitingFor) -> pb.WaitingFor:
    return pb.WaitingFor(node=w.node, since_seconds=w.since, step=w.step, reason=w.reason, wanted=w.wanted)


def tensor(t: source.TensorStatus) -> pb.Tensor:
    return pb.Tensor(
        name=t.name,
        domain=t.domain,
        dtype=t.dtype,
        shape=t.shape,
        address=t.address,
        codec=t.codec,
        bytes_raw=t.bytes_raw,
        bytes_wire=t.bytes_wire,
        residual_norm=t.residual_norm,
    )


def plan_rule(r: source.PlanRule) -> pb.PlanRule:
    return pb.PlanRule(pattern=r.pattern, codec=r.codec, scheme=r.scheme, origin=r.origin)


def plan(p: source.PlanStatus) -> pb.GetPlanResponse:
    return pb.GetPlanResponse(
        job=p.job,
        job_id=p.job_id,
        proposed_version=p.proposed_version,
        rules=[plan_rule(r) for r in p.rules],
        domains=[_domain_plan(d) for d in p.domains],
        mode=p.mode,
        quality=p.quality,
        planner=p.planner,
    )


def _domain_plan(d: source.DomainPlan) -> pb.DomainPlan:
    return pb.DomainPlan(
        id=d.id,
        label=d.label,
        plan_version=d.plan_version,
        since_step=d.since_step,
        switches=[pb.PlanSwitch(first_step=first, plan_version=version) for first, version in d.switches],
        rules=[plan_rule(r) for r in d.rules],
        groups=[
            pb.PlanGroup(
                section=g.section,
                blocks=g.blocks,
                tensors=g.tensors,
                first_tensor=g.first_tensor,
                bytes=g.bytes,
                codec=g.codec,
                scheme=g.scheme,
                rule=None if g.rule is None else plan_rule(g.rule),
                reason=g.reason,
            )
            for g in d.groups
        ],
        note=d.note,
        forecast=None if d.forecast is None else alike(pb.Forecast, d.forecast),
        controllers=[alike(pb.ControllerState, c) for c in d.controllers],
        predicted=[alike(pb.TimelineJob, j) for j in d.predicted],
        measured=[alike(pb.TimelineJob, j) for j in d.measured],
    )


def alike(kind: type[M], value: Any) -> M:
    """A message of a dataclass whose fields have its fields' names; None is left out."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        described = kind.DESCRIPTOR.fields_by_name[field.name]
        if part is None:
            continue
        if described.message_type is None:
            fields[field.name] = part
        elif described.is_repeated:
            fields[field.name] = [alike(described.message_type._concrete_class, p) for p in part]
        else:
            fields[field.name] = alike(described.message_type._concrete_class, part)
    return kind(**fields)


def trace_part(part: TracePart) -> pb.GetTraceResponse:
    if isinstance(part, TraceContext):
        return pb.GetTraceResponse(context=alike(pb.TraceContext, part))
    if isinstance(part, TracedNode):
        return pb.GetTraceResponse(node=alike(pb.TracedNode, part))
    return pb.GetTraceResponse(spans=[_span(s) for s in part])


def _span(s: Span) -> pb.TraceSpan:
    frame = s.kind in (Kind.SEND, Kind.RECEIVE)
    return pb.TraceSpan(
        kind=s.kind,  # type: ignore[arg-type]  # an open enumeration takes any number
        begin=s.begin,
        end=s.end,
        job=s.job.hex(),
        domain=s.domain,
        step=s.step,
        key=s.key,
        place=s.place,
        bytes=s.nbytes,
        peer=s.peer,
        link_seq=s.seq,
        phase=s.phase if frame else 0,
        resent=frame and s.resent,
    )


def change(c: source.PlanChange, kind: type[M]) -> M:
    """A response that says which plan carries a change and from which step on."""
    return kind(plan_version=c.plan_version, effective_step=c.effective_step, message=c.message)


def _name(prefix: str, value: enum.StrEnum) -> str:
    return f"{prefix}_{value.name}"


def enum_word(field: FieldDescriptor, number: int) -> str:
    """``NODE_STATE_SERVING`` as "serving"; the number itself for a value of a newer daemon."""
    known = field.enum_type.values_by_number.get(number)
    if known is None:
        return str(number)
    zero: str = field.enum_type.values_by_number[0].name
    word: str = known.name
    return word.removeprefix(zero.removesuffix("UNSPECIFIED")).lower()


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON would hold it: every field, numbers as numbers, enums as words, null for what is absent.

    Protobuf's own JSON writes 64-bit numbers as strings, which no script wants to compare.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_plain_value(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain_value(field, value)


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return enum_word(field, value) if field.enum_type is not None else value
