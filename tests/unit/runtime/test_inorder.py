"""Frames that arrive in another order than they were sent in.

What may live here: tests of `gcserver/runtime/inorder.py`. What may not: how frames arrive.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver.runtime.inorder import WINDOW, InOrder, OutOfOrder, numbered


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_frames_leave_in_the_order_they_were_numbered(arrival: list[int], large: set[int]) -> None:
    order, taken = InOrder(), []
    requests: dict[int, Any] = {number: SimpleNamespace(done=False, status=1) for number in large}
    for number in arrival:
        order.add(numbered(number, b"h%d" % number), None, requests.get(number))
        taken += [frame.header for frame in order.take()]
    for number in sorted(large, reverse=True):
        assert taken == [b"h%d" % n for n in range(min(n for n, r in requests.items() if not r.done))]
        requests[number].done, requests[number].status = True, 0
        taken += [frame.header for frame in order.take()]
    assert taken == [b"h%d" % number for number in range(12)] and not order.failed


@pytest.mark.parametrize("number", [0, 2, 1 + WINDOW, (1 << 64) - 1])
def test_numbers_that_no_honest_sender_uses_are_refused(number: int) -> None:
    order = InOrder()
    order.add(numbered(0, b""), None, None)
    order.add(numbered(2, b""), None, None)
    assert len(list(order.take())) == 1
    with pytest.raises(OutOfOrder, match="expected a new number from 1"):
        order.add(numbered(number, b""), None, None)


def test_a_header_without_a_number_is_refused() -> None:
    with pytest.raises(OutOfOrder, match="at least 8 bytes, got 7"):
        InOrder().add(bytes(7), None, None)


def test_a_payload_that_does_not_come_stops_what_follows() -> None:
    order = InOrder()
    failed: Any = SimpleNamespace(done=True, status=-25)
    order.add(numbered(0, b"a"), None, None)
    order.add(numbered(1, b"b"), memoryview(b"half"), failed)
    order.add(numbered(2, b"c"), None, None)
    assert not order.failed, "not before its turn"
    assert [frame.header for frame in order.take()] == [b"a"]
    assert order.failed and not list(order.take())
