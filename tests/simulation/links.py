"""Links, credit and payload handles as checks: part of what `checks.py` runs after every event.

What may live here: what must hold of a process at rest. What may not: rounds and steps (`checks.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcserver.core.events import DomainKey
from gcserver.core.link import Link
from gcserver.core.plan import SMALL_BYTES
from tests.simulation.lane_process import LaneProcess
from tests.simulation.processes import CONTROL, Process

if TYPE_CHECKING:
    from tests.simulation.checks import Checks


class Links:
    """Checks of links over one world. ``fail`` is that of all checks."""

    def __init__(self, checks: Checks) -> None:
        self.world, self.fail = checks.world, checks.fail

    def after(self, p: Process, touched: set[int] | None) -> None:
        """Credit is neither lost nor made, on either side; ``touched``: of links that were used, None of all."""
        links = p.machine.links
        for link in links.values() if touched is None else [links[peer] for peer in touched if peer in links]:
            self._link(p, link)
        if p.lane != CONTROL:
            self._parked(p)

    @staticmethod
    def _answers(p: Process, key: DomainKey) -> int:
        """Bytes of the tiny blocks that go to everyone, of the two steps that are retained."""
        domain = p.machine.domains.get(key) if p.lane != CONTROL else None
        blocks = domain.partitions.values() if domain is not None else ()
        return sum(2 * b.block.nbytes for b in blocks if b.block.nbytes <= SMALL_BYTES)

    def _link(self, p: Process, link: Link) -> None:
        for domain in link.accounts:
            out = link.outstanding(domain)
            if out < 0:
                self.fail("credit", f"{p.name} got back {-out} bytes more than it spent from {link.name}")
            # A payload of the first step goes beside half of it; what a peer asks for again is not held up by credit.
            bound = max(link.credit, link.credit // 2 + self.world.largest_payload)
            if out > bound and not self.world.everyone and out > bound + self._answers(p, domain):
                self.fail("credit", f"{p.name} has {out} bytes out at {link.name}, credit is {link.credit}")
        if not link.theirs:
            return
        other = self.world.process(link.name, p.lane)
        if other is None or other.incarnation != link.theirs:
            return
        back = other.machine.links.get(p.node.id)
        if back is None or back.theirs != p.incarnation:
            return
        for domain, account in link.accounts.items():
            taken = back.taken(domain)
            if taken > account.spent:
                self.fail("credit", f"{other.name} returned {taken} bytes of {account.spent} that {p.name} spent")
            # Where the domain is closed the books of it are closed too.
            if account.returned > taken and domain in other.machine.domains:
                self.fail("credit", f"{p.name} got {account.returned} back, {other.name} returned {taken}")
        if back.received >= link.next_seq:
            self.fail("G1", f"{other.name} received {back.received}, {p.name} sent {link.next_seq - 1}")

    def _parked(self, p: Process) -> None:
        """At an owner, at most the credit of each of the others is parked; or half of it and one payload."""
        for key, domain in p.machine.domains.items():
            parked: dict[int, list[int]] = {}
            for part in domain.partitions.values():
                for exchange in (x for r in part.rounds.values() for x in r.exchanges):
                    for member, x in exchange.parked.items():
                        if member != domain.config.me:
                            parked.setdefault(member, []).append(x.nbytes)
            for member, sizes in parked.items():
                bound = max(self.world.shape.credit, self.world.shape.credit // 2 + max(sizes))
                if sum(sizes) > bound and not self.world.everyone and sum(sizes) > bound + self._answers(p, key):
                    name = domain.config.members[member].name
                    self.fail("credit", f"{p.name} parks {sum(sizes)} bytes of {name}, bound is {bound}")

    def at_rest(self) -> None:
        """Nothing is held any more."""
        world = self.world
        for node in world.nodes:
            for p in node.processes():
                machine = p.machine
                if not isinstance(p, LaneProcess):
                    if machine.jobs and not world.fatal and not world.may_fail(node):
                        self.fail("G5", f"{p.name} still has jobs {[j.record.label for j in machine.jobs.values()]}")
                    continue
                if machine.domains and not world.fatal and not world.may_fail(node):
                    self.fail("G5", f"{p.name} still has domains {list(machine.domains)}")
                left = set(p.handles) - p.ghosts
                if not machine.domains and not machine.early.frames and left:
                    self.fail("handles", f"{p.name} leaks {len(left)} payloads")
                for link in machine.links.values():
                    if not machine.domains and any(a.spent or a.returned for a in link.accounts.values()):
                        self.fail("credit", f"{p.name} keeps books of credit at {link.name} for domains that are over")
