"""What a lane measures of the exchanges of a step, from events at given times.

What may live here: tests of `gcserver/runtime/delays.py`. What may not: what a controller makes of it
(`test_steering.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from gcproto.wire import FrameType, Header, Phase
from gcserver.core.events import DomainKey, Encoded, Finalised, FrameReceived, Tick
from gcserver.runtime.delays import STEPS, Delays

ID = (b"j" * 16, 0)
MEMBERS = (100, 101, 102)


@dataclass
class Node:
    """Member 0 of ``members`` nodes; block k belongs to member k modulo their number."""

    members: int = 3
    everyone: bool = False
    delays: Delays = field(init=False)
    domains: dict[DomainKey, SimpleNamespace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rounds = {step: SimpleNamespace(everyone=self.everyone) for step in (1, 2)}
        blocks = {k: SimpleNamespace(block=SimpleNamespace(owner=k % self.members), rounds=rounds) for k in range(6)}
        config = SimpleNamespace(members=range(self.members), me=0)
        self.domains[ID] = SimpleNamespace(config=config, partitions=blocks)
        self.delays = Delays(SimpleNamespace(domains=self.domains))  # type: ignore[arg-type]

    def ready(self, at: float, key: int = 1, nbytes: int = 100, step: int = 1) -> None:
        self.delays.on(Encoded(ID, key, step, 1, nbytes, 0, False), at)

    def summed(self, at: float, nbytes: int, key: int = 0) -> None:
        self.delays.on(Finalised(ID, key, 1, 1, nbytes, 0, False), at)

    def arrives(self, at: float, member: int, nbytes: int, result: bool = False, step: int = 1) -> None:
        phase = Phase.AGGREGATE if result else Phase.CONTRIBUTION
        header = Header(
            FrameType.DATA, phase, job=ID[0], domain=ID[1], step=step, sender=MEMBERS[member], payload_bytes=nbytes
        )
        self.delays.on(FrameReceived(header, 7), at)

    @property
    def result(self) -> tuple[float, float, int] | None:
        return self.delays.take(ID, 1)


def test_an_owner_sees_the_delay_the_skew_and_what_it_sends() -> None:
    node = Node()
    node.ready(10.0, key=1, nbytes=300)
    node.ready(10.1, key=0, nbytes=400)  # our own block: stays here
    node.arrives(10.2, 1, 100)
    # the last member begins 2 s late; its second contribution and its aggregate take 0.1 s for 100 bytes
    node.arrives(12.1, 2, 100)
    node.arrives(12.2, 2, 100)
    node.summed(12.25, 50)
    node.arrives(12.3, 1, 100, result=True)
    node.arrives(12.3, 2, 100, result=True)
    delay, skew, sent = node.result or pytest.fail("nothing was measured")
    assert (delay, skew) == pytest.approx((2.3, 2.0)) and sent == 300 + 2 * 50
    assert node.result is None, "a step is taken once"


def test_where_all_are_there_at_once_nothing_is_skew() -> None:
    node = Node()
    node.arrives(9.0, 1, 100)
    node.arrives(9.5, 1, 100)
    node.ready(10.0)
    node.arrives(10.5, 1, 100, result=True)
    assert node.result == (0.5, 0.0, 100), "we began last"


def test_large_payloads_on_a_slow_link_are_not_taken_for_a_late_member() -> None:
    node = Node(members=2)
    node.ready(10.0)
    node.arrives(11.0, 1, 1000)  # began with us: the next thousand bytes take a second as well
    node.arrives(12.0, 1, 1000, result=True)
    assert node.result == (2.0, 0.0, 100)


def test_of_a_single_payload_nothing_is_known_but_the_delay() -> None:
    node = Node(members=2, everyone=True)
    node.ready(10.0, nbytes=100)
    node.arrives(13.0, 1, 1000)
    assert node.result == (3.0, 0.0, 100)


def test_in_the_all_scheme_every_other_member_is_sent_to_and_the_last_contribution_counts() -> None:
    node = Node(everyone=True)
    for key in (0, 1, 2):
        node.ready(10.0 + 0.1 * key, key=key)
    for key in (0, 1, 2):
        node.arrives(10.2 + 0.1 * key, 1, 100)
        node.arrives(11.2 + 0.1 * key, 2, 100)
        node.summed(11.3 + 0.1 * key, 0, key)
    delay, skew, sent = node.result or pytest.fail("nothing was measured")
    assert (delay, skew) == pytest.approx((1.4, 1.1)) and sent == 3 * 2 * 100


def test_who_owns_nothing_here_takes_the_network_for_everything() -> None:
    node = Node(members=2)
    node.ready(10.0)
    node.arrives(15.0, 1, 100, result=True)
    node.arrives(16.0, 1, 100, result=True)
    assert node.result == (6.0, 0.0, 100)


def test_an_owner_that_began_last_saw_no_delay() -> None:
    node = Node(members=2)
    node.arrives(9.0, 1, 100)
    node.ready(10.0, key=0)
    assert node.result == (0.0, 0.0, 0)


def test_without_an_exchange_there_is_nothing_to_measure() -> None:
    node = Node()
    node.ready(10.0)
    assert node.result is None, "nobody sent anything"
    node.arrives(10.0, 1, 100)
    assert node.result is None, "we did not, in this life"
    node.delays.on(Tick(), 11.0)
    node.delays.on(FrameReceived(Header(FrameType.HEARTBEAT, sender=MEMBERS[1])), 11.0)
    assert node.result is None


def test_a_member_that_is_lost_leaves_nothing_behind() -> None:
    node = Node()
    node.ready(10.0)
    node.arrives(10.1, 1, 100)
    node.arrives(10.1, 1, 100, step=2)
    node.delays.forget(ID)
    del node.domains[ID]
    node.arrives(10.2, 2, 100)
    node.summed(10.3, 100)
    node.ready(10.4)
    assert node.result is None and node.delays.take(ID, 2) is None


def test_frames_of_steps_that_never_end_push_out_the_oldest() -> None:
    node = Node(members=2)
    node.arrives(1.0, 1, 100, step=1)
    node.arrives(1.0, 1, 100, step=2)
    for stray in range(10, 10 + STEPS - 1):
        node.arrives(2.0, 1, 100, step=stray)
    node.ready(3.0, step=2)
    assert node.delays.take(ID, 2) == (0.0, 0.0, 100)
    node.ready(3.0, step=1)
    assert node.delays.take(ID, 1) is None, "what came of it was pushed out"
