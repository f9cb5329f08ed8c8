"""Records of spans: what goes in comes out, the oldest make way and are counted, whole steps only.

What may live here: tests of `proto/spans.py`. What may not: who records.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcproto.spans import GRACE, RECORD_BYTES, Kind, Ring, Span, Window, frame_detail, unpack
from gcproto.wire import Flag, FrameType, Header, Phase

JOB, OTHER = b"j" * 16, b"o" * 16
U64 = st.integers(0, 2**64 - 1)
SPANS = st.builds(
    Span, st.floats(allow_nan=False), st.floats(allow_nan=False), st.binary(min_size=16, max_size=16), U64, U64, U64,
    U64, U64, U64, st.integers(0, 2**32 - 1), st.sampled_from(list(Kind)).map(int), st.integers(0, 2**16 - 1),
)  # fmt: skip


@given(spans=st.lists(SPANS, max_size=20), capacity=st.integers(1, 8))
def test_a_ring_keeps_the_newest_in_order_and_counts_the_others(spans: list[Span], capacity: int) -> None:
    ring = Ring(capacity)
    for span in spans:
        ring.add(span)
    assert list(unpack(ring.content())) == spans[-capacity:]
    assert ring.dropped == max(0, len(spans) - capacity)
    assert len(ring.content()) == RECORD_BYTES * min(len(spans), capacity)


def test_a_part_of_a_record_is_none() -> None:
    with pytest.raises(ValueError, match=f"a multiple of {RECORD_BYTES} bytes, got 7"):
        unpack(bytes(7))


def test_a_frames_detail_tells_its_phase_and_whether_it_was_sent_again() -> None:
    for phase in (Phase.CONTRIBUTION, Phase.AGGREGATE):
        for flags in (Flag.ALL, Flag.ALL | Flag.RESENT):
            detail = frame_detail(Header(FrameType.DATA, phase, flags=flags))
            span = Span(0.0, 0.0, JOB, 0, 1, 0, 0, 0, 0, 0, Kind.SEND, detail)
            assert (span.phase, span.resent) == (phase, bool(flags & Flag.RESENT))


def test_steps_that_had_begun_are_left_out_and_then_so_many_are_whole() -> None:
    window = Window(b"", 3, {(JOB, 0): 7})
    held = [step for step in range(5, 11) if window.holds(JOB, 0, step, 1.0)]
    assert held == [8, 9, 10]
    assert window.firsts() == ((JOB, 0, 8),)
    assert window.holds(JOB, 1, 1, 1.0), "a process group that came later"
    assert window.firsts() == ((JOB, 0, 8), (JOB, 1, 1))


def test_a_process_group_that_opens_later_begins_with_the_first_step_that_is_seen() -> None:
    """A lane that was started again in the middle of training: its groups are at thousands of steps."""
    window = Window(b"", 2, {})
    assert [window.holds(JOB, 0, 1000 + i, 10.0 * i) for i in range(4)] == [True, True, True, False]
    assert window.firsts() == ((JOB, 0, 1000),) and not window.holds(JOB, 0, 999, 99.0)


def test_later_steps_are_recorded_for_a_moment_in_which_others_may_still_be_at_theirs() -> None:
    window = Window(b"", 1, {})
    assert window.holds(JOB, 0, 1, 1.0) and window.holds(JOB, 0, 2, 5.0) and window.holds(JOB, 0, 3, 5.0 + GRACE)
    assert not window.holds(JOB, 0, 3, 5.01 + GRACE)
    assert window.holds(JOB, 0, 1, 99.0), "the rest of the step that was asked for"


def test_without_a_number_all_steps_are_recorded_and_other_jobs_never() -> None:
    window = Window(JOB, 0, {(JOB, 0): 1, (OTHER, 0): 1})
    assert window.holds(JOB, 0, 10**9, 1e9) and not window.holds(OTHER, 0, 5, 1.0)
    assert window.firsts() == ((JOB, 0, 2),)
