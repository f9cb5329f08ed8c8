"""The order in which contributions that wait for credit leave.

What may live here: tests of `gcserver/core/outbox.py`. What may not: credit.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcserver.core.outbox import Outbox

DOMAIN, OTHER = (b"j" * 16, 0), (b"j" * 16, 1)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9).map(lambda k: k * 64)), max_size=30))
def test_earlier_steps_first_then_the_highest_address(entries: list[tuple[int, int]]) -> None:
    box = Outbox()
    for step, key in entries:
        box.add(DOMAIN, step, key)
    left = []
    while (head := box.peek()) is not None:
        domain, step, key = head
        assert domain == DOMAIN
        left.append((step, key))
        box.pop(domain)
    assert left == sorted(entries, key=lambda e: (e[0], -e[1]))


def test_a_blocked_domain_is_passed_over() -> None:
    box = Outbox()
    box.add(DOMAIN, 1, 0)
    box.add(OTHER, 2, 64)
    assert box.peek() == (DOMAIN, 1, 0)
    assert box.peek({DOMAIN}) == (OTHER, 2, 64)
    assert box.peek({DOMAIN, OTHER}) is None
    box.pop(DOMAIN)
    assert box.peek() == (OTHER, 2, 64)
