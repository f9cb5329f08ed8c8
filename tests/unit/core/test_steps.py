"""Steps of a domain: closing, digests, settling, which plan a step runs under.

What may live here: tests of `gcserver/core/steps.py`. What may not: rounds, lanes.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcserver.core.steps import StepBook


def test_a_step_closes_when_all_local_ranks_pushed_the_same() -> None:
    book = StepBook(local_ranks=2, lag=2)
    step = book.get(1, now=5.0)
    step.keys[0] |= {64, 128}
    step.closed.add(0)
    assert not step.is_closed
    step.keys[1] |= {64}
    step.closed.add(1)
    assert step.is_closed
    assert step.close() == 128, "the key that only one of them pushed"
    step.keys[1] |= {128}
    assert step.close() is None
    assert step.digest
    assert book.get(1, now=9.0) is step and step.opened == 5.0


def test_the_digest_tells_keys_apart_and_not_their_order() -> None:
    digests = []
    for keys in ((0, 64), (64, 0), (0, 128), ()):
        step = StepBook(1, 2).get(1, 0.0)
        step.keys[0].update(keys)
        assert step.close() is None
        digests.append(step.digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_step_may_run_only_when_its_plan_is_fixed() -> None:
    book = StepBook(1, lag=2)
    assert [book.may_run(n) for n in (1, 2, 3)] == [True, True, False]
    book.settle(1, void=False, plan=0)
    assert book.may_run(3) and not book.may_run(4)


def test_settling_fixes_the_plan_lag_steps_ahead() -> None:
    book = StepBook(1, lag=2)
    book.settle(1, void=False, plan=5)
    assert [book.plan_version(n) for n in (2, 3, 9)] == [0, 5, 5]
    book.settle(2, void=True, plan=5)
    assert book.voids == {2}
    book.settle(3, void=False, plan=6)
    assert [book.plan_version(n) for n in (4, 5)] == [5, 6]


def test_a_new_step_proposes_the_newest_plan_known_when_it_opened() -> None:
    book = StepBook(1, lag=2)
    before = book.get(1, 0.0)
    book.known_proposal = 3
    assert (before.own_proposal, book.get(2, 0.0).own_proposal) == (0, 3)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1)), min_size=1, max_size=60), st.integers(1, 8))
def test_plan_versions_never_change_once_fixed(history: list[tuple[bool, int]], lag: int) -> None:
    """Whatever is settled, the plan of a step that may run stays what it was, also in a book taken up later."""
    book, plan, fixed = StepBook(1, lag), 0, {}
    for number, (void, more) in enumerate(history, 1):
        plan += more
        book.settle(number, void, plan)
        fixed[number + lag] = plan
        for later in range(number, number + lag + 1):
            assert book.plan_version(later) == fixed.get(later, 0)
        resumed = StepBook(1, lag, book.settled, set(book.voids), list(book.switches))
        assert resumed.plan_version(number + lag) == plan


def test_old_voids_are_dropped_but_recent_ones_stay() -> None:
    book = StepBook(1, lag=2)
    for n in range(1, 6000):
        book.settle(n, void=True, plan=0)
    assert len(book.voids) <= 4097 and 5999 in book.voids
