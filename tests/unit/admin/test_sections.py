"""Tables in the lines of a terminal: what stays, what goes, and that it is said.

What may live here: tests of `gcserver/admin/sections.py`. What may not: what `gcctl top` has to show (`test_top.py`).
"""

from __future__ import annotations

import pytest

from gcserver.admin.sections import Section, fitted, whole


def rows(name: str, count: int) -> list[str]:
    return [f"{name} {i}" for i in range(count)]


HEAD = Section("node", "a  serving")
JOBS = Section("jobs", "JOB", rows("job", 9), floor=4)
WAITING = Section("nodes that wait", "", rows("applicant", 4), floor=2)
PEERS = Section("peers", "PEER", rows("peer", 6), frozenset({2, 5}))
LANES = Section("lanes", "LANE", rows("lane", 8), frozenset({7}), floor=2)
TENSORS = Section("tensors", "TENSOR", rows("tensor", 40), floor=2, open_ended=True)
FULL = [HEAD, JOBS, WAITING, PEERS, LANES, TENSORS]
HINT = "in a larger window or by --once"


def test_what_fits_is_shown_whole() -> None:
    look = [HEAD, JOBS, Section("peers", "no peers")]
    text = "a  serving\n\nJOB\n" + "\n".join(rows("job", 9)) + "\n\nno peers"
    assert whole(look) == text == fitted(look, 80, 16)


def test_of_everything_something_is_left() -> None:
    """The usual window: 24 lines, the last of which stays empty."""
    shown = fitted(FULL, 80, 24).split("\n")
    assert shown == [
        "a  serving",
        "",
        "JOB", "job 0", "job 1", "job 2", f"... 6 more lines, {HINT}",
        "",
        "applicant 0", f"... 3 more lines, {HINT}",
        "",
        "PEER", "peer 2", "peer 5", f"... 4 more lines, {HINT}",
        "",
        "LANE", "lane 7", f"... 7 more lines, {HINT}",
        "",
        "TENSOR", "tensor 0", "tensor 1",
    ]  # fmt: skip


def test_lines_to_spare_go_to_what_matters_more() -> None:
    """Nine rows more: the first table and the second have all of theirs then, and the third begins to grow."""
    shown = fitted(FULL, 80, 33).split("\n")
    assert shown[3:12] == rows("job", 9) and shown[13:17] == rows("applicant", 4)
    assert shown[19:24] == ["peer 0", "peer 1", "peer 2", "peer 5", f"... 2 more lines, {HINT}"]
    assert shown[-3:] == ["TENSOR", "tensor 0", "tensor 1"]
    assert fitted(FULL, 80, 100).split("\n")[-41:] == ["TENSOR", *rows("tensor", 40)]


def test_the_last_tables_go_first_and_are_named() -> None:
    assert fitted(FULL, 80, 22).split("\n")[-3:] == [
        "lane 7",
        f"... 7 more lines, {HINT}",
        f"... tensors: {HINT}",
    ]
    assert fitted(FULL, 80, 9).split("\n") == [
        "a  serving", "", "JOB", "job 0", "job 1", "job 2", f"... 6 more lines, {HINT}",
        f"... nodes that wait, peers, lanes, tensors: {HINT}",
    ]  # fmt: skip


@pytest.mark.parametrize("look", [FULL, FULL[:2], [HEAD], [HEAD, PEERS, TENSORS]])
@pytest.mark.parametrize("columns", [1, 3, 20, 80])
def test_it_always_fits(look: list[Section], columns: int) -> None:
    for lines in range(1, 75):
        shown = fitted(look, columns, lines).split("\n")
        assert len(shown) <= max(lines - 1, 1) and max(map(len, shown)) <= columns
        assert shown[0] == HEAD.header[:columns]


def test_that_something_is_missing_is_always_said() -> None:
    for lines in range(3, 13):
        assert HINT in fitted([HEAD, JOBS], 80, lines).split("\n")[-1]
    assert HINT not in fitted([HEAD, JOBS], 80, 13)


def test_no_line_that_could_be_used_is_empty() -> None:
    for lines in range(24, 75):
        assert len(fitted(FULL, 80, lines).split("\n")) == min(lines - 1, len(whole(FULL).split("\n")))
