"""What asks a simulated daemon for more than it keeps or believes: lives, joins, ranks, steps, domains beyond bounds.

What may live here: one strain a bound. What may not: what is wrong in itself (`strangers.py`), what comes late
(`latecomers.py`).

Harmless ones are refused and change nothing; a deadly one ends a job, by a fault that says why.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from gcproto import messages, wire
from gcproto.messages import MAX_RANKS, EpochDecided, JobJoin, JobLeft, MemberInfo
from gcproto.wire import FrameType, Header, Phase
from gcserver.core import events as ev
from gcserver.core.accounts import MAX_BOOKS, Account
from tests.simulation.lane_process import LaneProcess
from tests.simulation.memory import CODECS
from tests.simulation.processes import CONTROL, LATEST_LIFE, received
from tests.simulation.strangers import blocks, pair, say, send_torn, stray, supervisors, unnumbered

if TYPE_CHECKING:
    from tests.simulation.world import World

#: how long a frame stays wanted that nobody takes, seconds
WANTED = 1.0


def lives_ahead(w: World, r: Random) -> None:
    """A daemon that is in no job says hello, then in lives whose numbers are ahead of all clocks."""
    there = [p for n in w.nodes for p in n.processes() if not p.paused]
    if not there:
        return
    p = r.choice(there)
    name, lane = w.stranger(), max(p.lane, 0)
    if p.lane != CONTROL:
        p.deliver(ev.PeerAdded(wire.node_id(name), name))
    hello = messages.Hello(name, f"tcp://{name}:7000", w.shape.lanes, lane, 1, "sim")
    ahead = LATEST_LIFE + 1
    for i, life in enumerate((1, 1, ahead, ahead, ahead + 1, 2)):
        w.at(w.now + 0.05 * i, p.deliver, unnumbered(FrameType.HELLO, name, p, hello, life))


def too_many_ranks(w: World, r: Random) -> None:
    """Registrations and a record of more ranks than a job has; joins of a node for more than it may wait with, and one
    whose number is ahead of all clocks."""
    for p in supervisors(w)[:1]:
        stray(w, p, 0.5).register("crowd", 1, MAX_RANKS + 1)
    found = pair(w, r)
    # Until its own job is formed a node's bound is not for others to fill.
    if found is None or not all(x.job for x in w.workers):
        return
    p, there, _ = found
    one, all_ranks = ((MemberInfo(p.node.name, p.node.address, tuple(range(n)))) for n in (1, MAX_RANKS))
    label = f"crowd{w.next_handle()}"
    say(p, there.name, EpochDecided(label, b"f" * 16, 1, MAX_RANKS + 1, (one,), (1,)))
    say(p, there.name, JobJoin(label, MAX_RANKS, all_ranks, p.incarnation))
    say(p, there.name, JobJoin(f"{label}-more", 2, one, p.incarnation))
    say(p, there.name, JobJoin(f"{label}-ahead", 2, one, LATEST_LIFE + 1))
    w.at(w.now + 0.5, say, p, there.name, JobLeft(label, b"", p.incarnation))


def far_ahead(w: World, r: Random) -> None:
    """A member contributes to a step that nobody can have come to, until it gives that up."""
    if (found := next(blocks(w, r), None)) is None:
        return
    p, d, peers, part = found
    c, until = d.config, w.now + WANTED
    h = Header(
        FrameType.DATA, Phase.CONTRIBUTION, dtype=int(part.block.dtype), codec=CODECS["none"].id, job=c.job,
        domain=c.domain, epoch=c.epoch, step=part.out_step + (1 << 20), key=part.block.key, sender=p.node.id,
        incarnation=p.incarnation, elements=part.block.elements, payload_bytes=0,
    )  # fmt: skip
    send_torn(p, r.choice(peers), h, lambda: w.now < until)


def many_domains(w: World, r: Random) -> None:
    """A member has spent credit in as many domains as are accounted for, none of which exists, and in one more."""
    for p, _, peers, _ in blocks(w, r):
        there = w.by_name[w.names[r.choice(peers)]].lanes.get(p.lane)
        back = there.machine.links.get(p.node.id) if there is not None and there.alive and not there.paused else None
        mine = p.machine.links[there.node.id] if there is not None else None
        if back is None or mine is None or (back.theirs, mine.theirs) != (p.incarnation, there.incarnation):
            continue
        assert isinstance(there, LaneProcess)
        made_up = [(b"m" * 16, i) for i in range(MAX_BOOKS)]
        back.accounts.update((key, Account()) for key in made_up)
        one_more = w.next_handle().to_bytes(16)
        filler = Header(FrameType.FILLER, job=one_more, sender=p.node.id, incarnation=p.incarnation, aux=64)
        there.deliver(received(mine.send(filler).header, None, b""))
        # As many as these would have to be sent for: what a peer made up goes with its life.
        for key in made_up:
            del back.accounts[key]
        return


# ---------------------------------------------------------------------------------------------- deadly
def born_ahead(w: World, r: Random) -> None:
    """A daemon is started again while its clock is years ahead: nobody believes its new life."""
    inside = [x.node for x in w.workers if len(x.spec.layout) > 1 and x.job and not x.over]
    n = r.choice(inside) if inside else None
    if n is not None and n.supervisor is not None:
        w.fatal = w.fatal or f"the clock of {n.name} is years ahead"
        n.lives_ahead = LATEST_LIFE
        w.kill(n.supervisor)


HARMLESS = (lives_ahead, too_many_ranks, far_ahead, many_domains)
DEADLY = (born_ahead,)
