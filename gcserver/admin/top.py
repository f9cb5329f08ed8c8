"""`gcctl top`: who waits for whom, looked at again and again.

What may live here: what of a daemon's answers is shown, how rates come of two looks, the loop. What may not: asking
(`gcctl.py`), how tables are drawn (`tables.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gcserver.admin import jsonform, tables
from gcserver.values import human_duration

#: Seconds between two looks unless ``--every`` says otherwise.
EVERY = 2.0
#: and at least: a daemon has other things to do.
SHORTEST = 0.1
_CLEAR = "\x1b[H\x1b[2J"


def overview(status: dict[str, Any], peers: dict[str, Any], jobs: dict[str, Any], steps: dict[str, float]) -> str:
    """One look as tables. ``steps``: by job id how many a second, where known."""
    state = status["state"] + (f": {status['reason']}" if status["reason"] else "")
    head = f"{tables.clean(status['node'])}  {tables.clean(state)}  up {human_duration(status['uptime_seconds'])}"
    parts = [head]
    rows = []
    for job in jobs["jobs"]:
        rate = steps.get(job["id"])
        waits = waiting(job)
        first = waits[0] if waits else ("-", "-", "-", "-")
        shown = "-" if rate is None else f"{rate:.2g}" if rate < 100 else f"{rate:.0f}"
        rows.append((job["label"], job["state"], job["step"], shown, *first))
        rows += [("", "", "", "", *more) for more in waits[1:]]
    header = ("JOB", "STATE", "STEP", "STEPS/S", "WAITS FOR", "TO SEND", "STEP", "SINCE")
    parts.append(tables.table(header, rows) if rows else "no jobs")
    if status["applicants"]:
        parts.append("\n".join(map(tables.entering, status["applicants"])))
    if peers["peers"]:
        parts.append(tables.peers(peers))
    return "\n\n".join(parts)


def waiting(job: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(who, what, in which step, since when) of everything a job waits for, the longest wait first."""
    found = [*job["waiting_for"], *(w for d in job["domains"] for w in d["waiting_for"])]
    found.sort(key=lambda w: -w["since_seconds"])
    return [
        (w["node"], w["wanted"], str(w["step"]) if w["step"] else "-", human_duration(w["since_seconds"]))
        for w in found
    ]


def rates(before: dict[str, int], now: dict[str, int], seconds: float) -> dict[str, float]:
    """Steps a second by job id, of jobs that both looks saw."""
    return {job: (now[job] - step) / seconds for job, step in before.items() if job in now and seconds > 0}


def fitted(text: str, columns: int, lines: int) -> str:
    """What of a look a terminal of that size can show without scrolling its beginning away; the last line is empty."""
    rows = text.split("\n")
    if len(rows) > lines - 1:
        shown = max(lines - 2, 0)
        rows = [*rows[:shown], f"... {len(rows) - shown} more lines, in a larger window or by --once"]
    return "\n".join(row[:columns] for row in rows)


def run(
    look: Callable[[], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]],
    show: Callable[[str], bool],
    every: float,
    once: bool,
    as_json: bool,
    screen: Callable[[], tuple[int, int]] | None,
) -> None:
    """Look and show until interrupted, until ``show`` says that nobody reads, or ``once``.

    ``screen``: columns and lines of a terminal, on which each look takes the place of the one before it; None: there
    is none, and looks follow each other whole.

    As JSON every look is one line: ``{"status": ..., "peers": [...], "jobs": [...]}``.
    """
    before: dict[str, int] = {}
    at = 0.0
    while True:
        status, peers, jobs = look()
        now = time.monotonic()
        steps = {job["id"]: int(job["step"]) for job in jobs["jobs"] if job["id"]}
        if as_json:
            text = jsonform.text({"status": status, **peers, **jobs})
        else:
            text = overview(status, peers, jobs, rates(before, steps, now - at))
        if screen is not None and not once:
            text = _CLEAR + fitted(text, *screen())
        if not show(text) or once:
            return
        before, at = steps, now
        _sleep(every)


def _sleep(seconds: float) -> None:
    """In short pieces: a signal that comes the moment before a sleep begins does not end that one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
