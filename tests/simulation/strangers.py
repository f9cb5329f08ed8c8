"""What reaches a simulated daemon from those that do not belong to its jobs, and from members that are faulty.

What may live here: foreign hellos, frames that fit no job, records and registrations that do not fit together. What
may not: damage on the way (`network.py`), workers of the jobs (`mistakes.py`).

Harmless ones must change nothing but counters and logs; deadly ones come from a member with a proper link and end its
job by a fault that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from gcproto import messages, packed, wire
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import EpochDecided, MemberInfo, Rule
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.domain import Domain
from gcserver.core.rounds import Partition
from tests.simulation.lane_process import LaneProcess
from tests.simulation.memory import CODECS, FOREIGN, TORN
from tests.simulation.processes import CONTROL, ControlProcess, Process, received

if TYPE_CHECKING:
    from tests.simulation.world import Node, World

FAR = 1 << 40


def supervisors(w: World) -> list[ControlProcess]:
    return [n.supervisor for n in w.nodes if n.supervisor and n.supervisor.alive and not n.supervisor.paused]


def _any(w: World, r: Random) -> Process | None:
    """A process that listens now."""
    there = [p for n in w.nodes for p in n.processes() if not p.paused]
    return r.choice(there) if there else None


# ------------------------------------------------------------------------------------ unknown senders
def unnumbered(kind: FrameType, sender: str, p: Process, message: Any, life: int = 1) -> ev.FrameReceived:
    """A frame of another daemon's life for this process, as it has no number on a link."""
    body = packed.encode(message)
    header = Header(kind, sender=wire.node_id(sender), incarnation=life, to_incarnation=p.incarnation,
                    payload_bytes=len(body), payload_digest=wire.digest(body))  # fmt: skip
    return received(header, None, body)


def stranger(w: World, r: Random) -> None:
    """A daemon that nobody told us of says hello, with other lanes than ours, then in order, then as somebody else."""
    p = _any(w, r)
    if p is None:
        return
    name = w.stranger()
    p.deliver(unnumbered(FrameType.HEARTBEAT, name, p, messages.Beat(0)))
    if p.lane != CONTROL:
        p.deliver(ev.PeerAdded(wire.node_id(name), name))
    lane, lanes = max(p.lane, 0), w.shape.lanes
    hellos = [
        (name, name, lanes),
        (name, name, lanes + 1),
        (name, name, lanes + 1),
        (name, name, lanes),
        ("somebody", name, lanes),
        (name, "somebody", lanes),
    ]
    for i, (says, sender, count) in enumerate(hellos):
        hello = messages.Hello(says, f"tcp://{name}:7000", count, lane, 1, "sim")
        w.at(w.now + 0.3 * i, _deliver, p, unnumbered(FrameType.HELLO, sender, p, hello, 5 + i))
    old = unnumbered(FrameType.HELLO, name, p, messages.Hello(name, f"tcp://{name}:7000", lanes, lane, 1, "sim"), 2)
    w.at(w.now + 1.6, _deliver, p, old)
    for when in (1.7, 1.75):
        refusal = unnumbered(FrameType.REFUSE, name, p, messages.Refuse("lanes differ"), 2)
        w.at(w.now + when, _deliver, p, refusal)


def _deliver(p: Process, event: Any) -> None:
    p.deliver(event)


def namesake(w: World, r: Random) -> None:
    """Frames under this node's own name: its own, and those of another daemon with that name."""
    for p in supervisors(w)[:1]:
        for life in (p.incarnation, p.incarnation + 1):
            p.deliver(unnumbered(FrameType.HEARTBEAT, p.node.name, p, messages.Beat(0), life))


def rubbish(w: World, r: Random) -> None:
    """Damaged frames of nobody, peers that are added twice, frames and numbers that no sender of ours makes."""
    p = _any(w, r)
    if p is None:
        return
    p.deliver(ev.FrameDamaged(None, None, "header digest"))
    p.deliver(ev.FrameDamaged(None, wire.node_id("nobody"), "header digest"))
    p.deliver(ev.PeerReset(wire.node_id("nobody")))
    for link in list(p.machine.links.values()):
        p.deliver(ev.PeerAdded(link.peer, link.name))
        if not link.up:
            continue
        h = Header(FrameType.CONTROL, sender=link.peer, incarnation=link.theirs, to_incarnation=p.incarnation,
                   link_seq=link.highest + FAR)  # fmt: skip
        p.deliver(received(h, None, b""))
        p.deliver(ev.FrameDamaged(h, link.peer, "payload digest"))
        stale = Header(FrameType.DATA, sender=link.peer, incarnation=1, to_incarnation=p.incarnation, link_seq=1)
        p.deliver(ev.FrameDamaged(stale, link.peer, "payload digest"))
        if p.lane == CONTROL:
            for _ in range(10):
                p.deliver(ev.FrameDamaged(None, link.peer, "header digest"))
        else:
            p.deliver(ev.Unusable(stale, "rubbish"))
    p.deliver(ev.FrameReceived(Header(FrameType.HELLO, sender=wire.node_id("nobody")), None, b"\xc1"))


# -------------------------------------------------------------------------------- registrations, records
class Stray:
    """A process that registers and is in no job. ``heard``: what the daemon told it."""

    def __init__(self, w: World, p: ControlProcess) -> None:
        self.world, self.daemon = w, p
        self.connection = w.next_handle()
        self.heard: list[messages.ToWorker] = []
        p.connections[self.connection] = self
        w.open_workers += 1

    def say(self, message: messages.WorkerAct) -> None:
        self.daemon.deliver(ce.WorkerSaid(self.connection, message))

    def register(self, label: str, rank: int, size: int, local: int = 0, local_size: int = 1, **more: Any) -> None:
        number = b"s" * 16 if rank == 0 else b""
        self.say(messages.Register(label, rank, size, local, local_size, 1, **({"number": number} | more)))

    def told(self, message: messages.ToWorker, connection: int) -> None:
        self.heard.append(message)

    def disconnected(self, supervisor: ControlProcess) -> None:
        """The daemon died; the stray does not come back."""

    def leave(self, answered: bool) -> None:
        """It ends; ``answered``: it must have been told something."""
        self.world.open_workers -= 1
        p = self.daemon
        if p.alive and answered and not p.paused and not self.heard:
            self.world.checks.fail("G6", f"{p.name} never told a worker why it is in no job")
        p.deliver(ce.WorkerGone(self.connection))
        p.connections.pop(self.connection, None)


def stray(w: World, p: ControlProcess, seconds: float, answered: bool = True) -> Stray:
    s = Stray(w, p)
    w.at(w.now + seconds, s.leave, answered)
    return s


def odd_workers(w: World, r: Random) -> None:
    """Registrations that cannot be, and workers that speak before they registered."""
    for p in supervisors(w)[:1]:
        stray(w, p, 0.5).register("odd", 3, 2)
        stray(w, p, 0.5).register("odd", 0, 2, number=b"short")
        stray(w, p, 0.5).register("odd", 1, 2, on_loss="pray")
        stray(w, p, 0.5).register("odd", 1, 2, plan="magic")
        stray(w, p, 0.5).say(messages.WhoAreYou())
        stray(w, p, 0.5).say(messages.Unregister())
        for job in (b"k" * 16, *p.machine.failed):
            stray(w, p, 0.5).say(messages.Reattach(job, 0, 1))


def drain(w: World, r: Random) -> None:
    """A daemon that takes no new jobs goes on with those it has, and says why it takes none."""
    ps = [p for p in supervisors(w) if p.machine.jobs]
    if ps and all(x.job for x in w.workers):
        p = r.choice(ps)
        p.deliver(ce.DrainAsked(r.choice(["", "maintenance"])))
        stray(w, p, 0.5).register("late", 0, 1)


def odd_gathering(w: World, r: Random) -> None:
    """Workers whose ranks and sizes never make a job: they hear whom they wait for, or that they do not fit."""
    ps = supervisors(w)
    label = f"stray{w.next_handle()}"
    a, b = ps[:1] + r.sample(ps[1:], 1) if len(ps) > 1 else (ps * 2)[:2] or (None, None)
    if a is None or b is None:
        return
    kind = r.randrange(5)
    if kind == 0 and a is not b:  # the same rank twice
        stray(w, a, 3.0).register(label, 0, 3)
        stray(w, b, 3.0).register(label, 1, 3, 0, 2)
        stray(w, b, 3.0).register(label, 1, 3, 1, 2)
    elif kind == 1:  # one of two local ranks
        stray(w, a, 4.0).register(label, 0, 2, 0, 2)
    elif kind == 2 and a is not b:  # another world size
        stray(w, a, 4.0).register(label, 0, 2)
        stray(w, b, 4.0).register(label, 1, 3)
    elif kind == 3:  # another run of the same name comes, and the same local rank twice
        stray(w, a, 1.0).register(label, 0, 3, 0, 2)
        stray(w, a, 1.0).register(label, 0, 4, 0, 2)
        stray(w, a, 4.0).register(label, 0, 4, 0, 2)
    else:  # the node of rank 0 makes a job of a codec that this one does not know
        stray(w, b, 4.0, False).register(label, 1, 2)
        w.at(w.now + 0.1, _odd_record, w, a, b, label)


def _odd_record(w: World, a: ControlProcess, b: ControlProcess, label: str) -> None:
    gathering = b.machine.gatherings.get(label)
    if gathering is not None and a is not b and a.alive:
        members = (MemberInfo(a.node.name, a.node.address, (0,)), MemberInfo(b.node.name, b.node.address, (1,)))
        nonces = (1, gathering.nonce)
        say(a, b.node.name, EpochDecided(label, b"o" * 16, 1, 2, members, nonces, (Rule("*", "nosuch"),)))


def say(p: ControlProcess, node: str, message: messages.Control) -> None:
    """A faulty supervisor says something over its proper link."""
    machine = p.machine
    machine.peers.send(node, message)
    out = machine.out.copy()
    machine.out.clear()
    for effect in out:
        p.DO[type(effect)](p, effect)


def pair(w: World, r: Random) -> tuple[ControlProcess, Node, Any] | None:
    """(a member's supervisor, another member's node, their job)."""
    found = [
        (p, w.by_name[other], job)
        for p in supervisors(w)
        for job in p.machine.jobs.values()
        if job.ended is None and job.domains
        for other in job.others
    ]
    return r.choice(found) if found else None


def odd_messages(w: World, r: Random) -> None:
    """Messages of unknown jobs, and of a job from members whose business they are not."""
    if (found := pair(w, r)) is None:
        return
    p, there, job = found
    one = (MemberInfo("x", "tcp://x:1", (0,)),)
    here = (MemberInfo(there.name, there.address, (0,)),)
    section = Section(0, (TensorSpec("t", (4,), 1),))
    odd: list[messages.Control] = [
        EpochDecided("forged", b"f" * 16, 1, 1, one, ()),
        EpochDecided("forged", b"short", 1, 1, one, (1,)),
        EpochDecided("forged", b"f" * 16, 1, 1, one, (1,)),
        EpochDecided("forged", b"f" * 16, 1, 1, here, (1,), controller="wobble"),
        EpochDecided("forged", b"f" * 16, 1, 1, here, (1,), (Rule("*", "nosuch"),)),
        messages.JobLeft("nosuch", b"n" * 16),
        messages.JobLeft("nosuch", b"", 5),
        messages.JoinRefusal("nosuch", (("x", 5),), "no"),
        messages.SectionOffer(b"n" * 16, 0, 0, 1),
        messages.SectionList(job.id, 99, messages.DeclareDomain("g", 99, (0,)), section, 0),
        messages.PlanReady(job.id, 0, "it was said before"),
        messages.PlanReady(job.id, 99, "there is no such plan"),
    ]
    # Where members can be lost it may be the first one by the time that is read: then a plan is its business.
    if p.node.name != job.first and not job.commits:
        odd += [messages.PlanText(job.id, 99, 1, ()), messages.PlanGo(job.id, 99)]
    for message in odd:
        say(p, there.name, message)
    link = p.machine.peers.link(there.name)
    if link is not None and link.up:
        body = b"\xc1"
        h = Header(FrameType.CONTROL, sender=p.node.id, incarnation=p.incarnation, payload_bytes=1,
                   payload_digest=wire.digest(body))  # fmt: skip
        p.DO[fx.Send](p, link.send(h, body=body))


# --------------------------------------------------------------------------------- faulty members: data
def blocks(w: World, r: Random) -> Iterator[tuple[LaneProcess, Domain, list[int], Partition]]:
    """A block drawn of each domain of each lane, and the other members that the lane has links to."""
    lanes = [p for n in w.nodes for p in n.processes() if isinstance(p, LaneProcess) and not p.paused]
    for p in r.sample(lanes, len(lanes)):
        for d in p.machine.domains.values():
            peers = [m.node for m in d.config.members if m.node != p.node.id and p.machine.links[m.node].up]
            if peers and d.partitions:
                yield p, d, peers, d.partitions[r.choice(list(d.partitions))]


def send_torn(p: LaneProcess, peer: int, header: Header, wanted: Callable[[], bool] = lambda: True) -> None:
    """A frame with a proper link sequence, whose payload nobody should see; ``wanted``: whether it is sent again."""
    handle = p.new_handle((TORN, 1))
    p.ghosts.add(handle)
    p.DO[fx.Send](p, p.machine.links[peer].send(header, handle, wanted=wanted))


def frame(w: World, r: Random, away: bool = False, back: int = -1, **change: Any) -> bool:
    """A contribution or aggregate to the next round of some block, over a proper link, with fields changed.

    ``away``: to a node that does not own the block; ``back``: of so many steps before the newest that is over for both.
    False where there was none to send.
    """
    for p, d, peers, part in blocks(w, r):
        owner = d.config.members[part.block.owner].node
        others = [n for n in peers if n != owner]
        if (away and not others) or part.out_step <= back:
            continue
        peer = r.choice(others) if away else owner if owner in peers else peers[0]
        there = w.by_name[w.names[peer]].memory.blocks.get((d.id, part.block.key))
        if back >= 0 and (there is None or there.out_step < part.out_step - back):
            # Over only here: a member may be a step behind, and a step need not be one of this block. That nobody else
            # pushed it the receiver then learns from what members have closed.
            continue
        phase = Phase.AGGREGATE if owner == p.node.id else Phase.CONTRIBUTION
        c, fields = d.config, {"type": FrameType.DATA, "elements": part.block.elements, "codec": CODECS["none"].id}
        h = Header(**(fields | {
            "phase": phase, "dtype": int(part.block.dtype), "job": c.job, "domain": c.domain, "epoch": c.epoch,
            "step": part.out_step - back, "key": part.block.key, "sender": p.node.id, "incarnation": p.incarnation,
        } | change))  # fmt: skip
        if h.type is FrameType.DATA:
            send_torn(p, peer, h)
        else:
            p.DO[fx.Send](p, p.machine.links[peer].send(h, None))
        return True
    return False


def misdirected(w: World, r: Random) -> None:
    """A contribution to a node that does not own the block, and a frame of a kind that lanes do not speak."""
    frame(w, r, away=True, phase=Phase.CONTRIBUTION, flags=0)
    frame(w, r, type=FrameType.CONTROL, phase=Phase.NONE)


def other_release(w: World, r: Random) -> None:
    """A member encodes with another codec than the others, or another number or type of elements."""
    # A type that no tensor here has: the frame is otherwise one of the right release, and as such a lie.
    change = r.choice(
        [{"codec": FOREIGN}, {"codec": FOREIGN, "flags": int(Flag.AVERAGE)}, {"elements": 3}, {"dtype": int(DType.U8)}]
    )
    if frame(w, r, **change):
        w.fatal = w.fatal or "a member runs another release"


def undecodable(w: World, r: Random) -> None:
    """Payloads of a member do not decode although their digests hold."""
    if len(w.nodes) > 1:
        a, b = r.sample(w.nodes, 2)
        w.fatal = w.fatal or f"payloads of {a.name} do not decode at {b.name}"
        w.network.spoil(a.name, b.name, r.randrange(w.shape.lanes), "unusable", 2)


def odd_offer(w: World, r: Random) -> None:
    """A member offers, lists or closes something that cannot be."""
    if (found := pair(w, r)) is None:
        return
    p, there, job = found
    w.fatal = w.fatal or f"{p.node.name} says what cannot be"
    key, domain = next(iter(job.domains.items()))
    wrong = Section(0, (TensorSpec("nothing", (-1,), 1),))
    declared = messages.DeclareDomain("another", key, domain.declared_as.ranks)
    right = domain.sections[0] if domain.sections else Section(0, (TensorSpec("t", (4,), 1),))
    odd: list[messages.Control] = [
        messages.SectionOffer(job.id, key, -1, 1),
        messages.SectionList(job.id, key, domain.declared_as, wrong, 0),
        messages.SectionList(job.id, key, declared, right, 0),
    ]
    say(p, there.name, r.choice(odd))


HARMLESS = (stranger, namesake, rubbish, odd_workers, odd_gathering, odd_messages, misdirected, drain)
DEADLY = (other_release, undecodable, odd_offer)
