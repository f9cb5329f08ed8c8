"""`gcctl top`: whom jobs wait for, as tables and as JSON, once and again and again.

What may live here: tests of `gcserver/admin/top.py`. What may not: how a daemon is asked (`test_gcctl.py`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gcserver.admin import top

STATUS = {"node": "a", "state": "serving", "reason": "", "uptime_seconds": 7500.0, "applicants": []}
PEERS: dict[str, Any] = {"peers": []}


def wait(node: str, wanted: str, seconds: float, step: int = 0) -> dict[str, Any]:
    return {"node": node, "wanted": wanted, "since_seconds": seconds, "step": step, "reason": "exchange"}


def job(
    step: int, *of_steps: dict[str, Any], label: str = "gpt", own: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    domains = [{"waiting_for": list(of_steps)}]
    return {"label": label, "id": label * 3, "state": "running", "step": step, "domains": domains, "waiting_for": own}


def test_who_is_waited_for_longest_comes_first() -> None:
    gpt = job(
        41,
        wait("b", "aggregate", 3.5, 42),
        wait("c", "contribution", 8.0, 42),
        own=(wait("rank 2", "connection", 5.0),),
    )
    shown = top.overview(STATUS, PEERS, {"jobs": [gpt, job(7, label="cnn")]}, {"gptgptgpt": 12.34, "cnncnncnn": 152.4})
    assert shown.splitlines() == [
        "a  serving  up 2 h 5 min",
        "",
        "JOB  STATE    STEP  STEPS/S  WAITS FOR  TO SEND       STEP  SINCE",
        "gpt  running  41    12       c          contribution  42    8 s",
        "-    -        -     -        rank 2     connection    -     5 s",
        "-    -        -     -        b          aggregate     42    3.5 s",
        "cnn  running  7     152      -          -             -     -",
    ]


def test_without_jobs_and_with_peers() -> None:
    peer = {
        "name": "b", "address": "tcp://b:1", "state": "up", "last_heard_seconds": 0.25, "rtt_seconds": None,
        "bytes_in": 0, "bytes_out": 0, "frames_resent": 0, "frames_corrupt": 0, "encrypted": False, "reason": "",
        "since_seconds": 90.0,
    }  # fmt: skip
    shown = top.overview(
        STATUS | {"state": "degraded", "reason": "lane 0 is silent"}, {"peers": [peer]}, {"jobs": []}, {}
    )
    assert (
        "a  degraded: lane 0 is silent" in shown
        and "no jobs" in shown
        and "tcp://b:1" in shown
        and "1 min 30 s" in shown
    )


def test_who_waits_to_come_in_is_shown() -> None:
    waits = {"node": "c", "job": "gpt", "since_seconds": 12.0, "reason": "not there yet: b\x1b[2J"}
    shown = top.overview(STATUS | {"applicants": [waits]}, PEERS, {"jobs": []}, {})
    assert "c has waited 12 s to come into job gpt: not there yet: b\\x1b[2J" in shown


def test_steps_a_second_come_of_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks, shown = [10.0], [job(40), job(50), job(60)], []
    monkeypatch.setattr(top.time, "monotonic", lambda: clock[0])

    def pause(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(top.time, "sleep", pause)

    def show(text: str) -> bool:
        shown.append(text)
        return len(shown) < 3

    top.run(lambda: (STATUS, PEERS, {"jobs": [looks.pop(0)]}), show, 2.0, False, False, lambda: (80, 24))
    assert not looks, "nobody reads: no further look"
    assert all(text.startswith("\x1b[H\x1b[2J") for text in shown)
    rates = [line.split()[2:4] for text in shown for line in text.splitlines() if line.startswith("gpt")]
    assert rates == [["40", "-"], ["50", "5"], ["60", "5"]]


@pytest.mark.parametrize(("columns", "lines"), [(200, 50), (60, 12), (20, 5), (1, 1), (3, 2)])
def test_a_look_fits_its_terminal(columns: int, lines: int) -> None:
    look = top.overview(STATUS, PEERS, {"jobs": [job(i, wait("b", "aggregate", i)) for i in range(20)]}, {})
    whole, shown = look.split("\n"), top.fitted(look, columns, lines).split("\n")
    assert len(shown) <= max(lines - 1, 1) and max(map(len, shown)) <= columns
    last = f"... {len(whole) - len(shown) + 1} more lines, in a larger window or by --once"
    assert shown == (whole if lines > len(whole) else [row[:columns] for row in (*whole[: len(shown) - 1], last)])


def test_as_json_a_look_is_a_line() -> None:
    shown: list[str] = []

    def show(text: str) -> bool:
        shown.append(text)
        return True

    top.run(lambda: (STATUS, PEERS, {"jobs": [job(4)]}), show, 2.0, True, True, None)
    assert json.loads(shown[0]) == {"status": STATUS, "peers": [], "jobs": [job(4) | {"waiting_for": []}]}
    assert len(shown) == 1 and "\n" not in shown[0]
