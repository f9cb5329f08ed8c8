"""What is kept of messages that come before their job.

What may live here: tests of `gcserver/core/early_messages.py`. What may not: what the messages do (`test_control.py`).
"""

from __future__ import annotations

from gcproto import packed
from gcproto.messages import OfJob, PlanText, Rule, SectionOffer
from gcserver.core.early_messages import MAX_EARLY, MAX_EARLY_BYTES, EarlyMessages


def offer(i: int, job: bytes = b"j" * 16) -> SectionOffer:
    return SectionOffer(job, i, 0, 1)


def test_messages_come_out_once_in_the_order_of_their_node() -> None:
    early: EarlyMessages[OfJob] = EarlyMessages()
    for node, i in (("b", 1), ("c", 7), ("b", 2)):
        early.keep(node, offer(i))
    assert len(early) == 3
    assert early.take() == [("b", offer(1)), ("b", offer(2)), ("c", offer(7))]
    assert (early.take(), len(early)) == ([], 0)


def test_the_oldest_of_too_many_go_and_other_nodes_lose_none() -> None:
    early: EarlyMessages[OfJob] = EarlyMessages()
    early.keep("c", offer(0))
    for i in range(MAX_EARLY + 50):
        early.keep("b", offer(i))
    taken = early.take()
    assert [m for node, m in taken if node == "c"] == [offer(0)]
    assert [m for node, m in taken if node == "b"] == [offer(i) for i in range(50, MAX_EARLY + 50)]


def test_bytes_are_bounded_too() -> None:
    early: EarlyMessages[OfJob] = EarlyMessages()
    large: list[OfJob] = [PlanText(b"j" * 16, i, i, (Rule("x" * (MAX_EARLY_BYTES // 4), "none"),)) for i in range(6)]
    for m in large:
        early.keep("b", m)
    assert [m for _, m in early.take()] == large[3:], "three are more than three quarters, four more than all"
    early.keep("b", PlanText(b"j" * 16, 1, 1, (Rule("x" * MAX_EARLY_BYTES, "none"),)))
    assert len(early) == 0, "one that is larger than all that may be kept"
    for i in range(MAX_EARLY):
        early.keep("b", offer(i))
    assert len(early) == MAX_EARLY, "bytes of those that went are free again"
    assert len(packed.encode(large[0])) > MAX_EARLY_BYTES // 4


def test_a_job_that_is_over_takes_its_messages_along() -> None:
    early: EarlyMessages[OfJob] = EarlyMessages()
    early.keep("b", offer(1))
    early.keep("b", offer(2, b"k" * 16))
    early.keep("c", offer(3))
    early.forget(b"j" * 16)
    assert early.take() == [("b", offer(2, b"k" * 16))]
