"""`gcctl top`: this node, jobs and whom they wait for, links, lanes and tensors, looked at again and again.

What may live here: what of a daemon's answers is shown, how rates come of two looks, which tensors are asked for and
when, the loop. What may not: asking (`gcctl.py`), how tables are drawn (`tables.py`), what of them fits a terminal
(`sections.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gcserver.admin import jsonform, tables
from gcserver.admin.sections import Section, fitted, whole
from gcserver.values import human_duration, human_size

JSON = dict[str, Any]

#: Seconds between two looks unless ``--every`` says otherwise.
EVERY = 2.0
#: and at least: a daemon has other things to do.
SHORTEST = 0.1
#: Between looks at tensors, for which the daemon asks its lanes, of all of a model at once: seconds, and how many times
#: as long as the last one took.
TENSORS_EVERY: Final = 10.0
TENSORS_SHARE: Final = 20.0
#: Seconds that they may take: where a lane hangs, who is waited for matters more.
TENSORS_WITHIN: Final = 1.0
#: The largest so many are kept of them, and shown where no window says how many there may be.
MOST_TENSORS: Final = 100
SOME_TENSORS: Final = 10
_CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True)
class Counts:
    """What one look counted. ``life``: of the daemon; another one counts from the beginning. ``steps``: by job id.
    ``came``, ``went``: bytes by peer."""

    at: float
    life: int
    steps: Mapping[str, int]
    came: Mapping[str, int]
    went: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """The same a second, as far as it is known."""

    steps: Mapping[str, float] = field(default_factory=dict)
    came: Mapping[str, float] = field(default_factory=dict)
    went: Mapping[str, float] = field(default_factory=dict)

    def of_peer(self, name: str) -> tuple[str, str]:
        came, went = self.came.get(name), self.went.get(name)
        return "-" if came is None else human_size(came), "-" if went is None else human_size(went)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest ``tensors`` of a job, the largest first. ``job``: its label."""

    job: str
    tensors: Sequence[JSON]


# -------------------------------------------------------------------------------------------- shown
def overview(
    status: JSON, peers: JSON, jobs: JSON, rates: Rates | None, largest: Largest | None, window: bool
) -> list[Section]:
    """One look. ``rates``: None where there will be none. ``window``: it is to fit one, so that columns are few."""
    state = status["state"] + (f": {status['reason']}" if status["reason"] else "")
    head = f"{tables.clean(status['node'])}  {tables.clean(state)}  up {human_duration(status['uptime_seconds'])}"
    parts = [Section("node", head), _jobs(jobs, rates or Rates())]
    if status["applicants"]:
        parts.append(Section("nodes that wait", "", [tables.entering(a) for a in status["applicants"]], floor=2))
    if peers["peers"]:
        if window:
            parts.append(_links(peers, rates or Rates()))
        else:
            parts.append(_section("peers", tables.peers(peers, rates.of_peer if rates else None)))
    if status["lanes"]:
        silent = frozenset(i for i, lane in enumerate(status["lanes"]) if lane["state"] != "ready")
        parts.append(_section("lanes", tables.lanes(status), silent, floor=2))
    if largest is not None:
        parts.append(_tensors(largest, MOST_TENSORS if window else SOME_TENSORS))
    return parts


def _section(name: str, table: str, urgent: frozenset[int] = frozenset(), floor: int = 3) -> Section:
    header, *rows = table.split("\n")
    return Section(name, header, rows, urgent, floor)


def _jobs(jobs: JSON, rates: Rates) -> Section:
    rows: list[tables.Row] = []
    waiting_ones = set()
    for job in jobs["jobs"]:
        rate = rates.steps.get(job["id"])
        waits = waiting(job)
        first = waits[0] if waits else ("-", "-", "-", "-")
        if waits:
            waiting_ones.add(len(rows))
        shown = "-" if rate is None else f"{rate:.2g}" if rate < 100 else f"{rate:.0f}"
        rows.append((job["label"], job["state"], job["step"], shown, *first))
        rows += [("", "", "", "", *more) for more in waits[1:]]
    if not rows:
        return Section("jobs", "no jobs")
    header = ("JOB", "STATE", "STEP", "STEPS/S", "WAITS FOR", "TO SEND", "STEP", "SINCE")
    return _section("jobs", tables.table(header, rows), frozenset(waiting_ones), floor=4)


def waiting(job: JSON) -> list[tuple[str, str, str, str]]:
    """(who, what, in which step, since when) of everything a job waits for, the longest wait first."""
    found = [*job["waiting_for"], *(w for d in job["domains"] for w in d["waiting_for"])]
    found.sort(key=lambda w: -w["since_seconds"])
    return [
        (w["node"], w["wanted"], str(w["step"]) if w["step"] else "-", human_duration(w["since_seconds"]))
        for w in found
    ]


def _links(peers: JSON, rates: Rates) -> Section:
    """What 80 columns hold of peers. Why one is not up is below it: it is longer than all the rest."""
    header, *lines = tables.table(
        ("PEER", "STATE", "SINCE", "RTT", "IN/S", "OUT/S", "RESENT", "CORRUPT"),
        [
            (p["name"], p["state"], tables.since(p["since_seconds"] or None), tables.since(p["rtt_seconds"]),
             *rates.of_peer(p["name"]), p["frames_resent"], p["frames_corrupt"])
            for p in peers["peers"]
        ],
    ).split("\n")  # fmt: skip
    rows: list[str] = []
    urgent = set()
    for peer, line in zip(peers["peers"], lines, strict=True):
        if peer["state"] != "up":
            urgent.add(len(rows))
        rows.append(line)
        if peer["reason"]:
            urgent.add(len(rows))
            rows.append(f"  {tables.clean(peer['reason'])}")
    return Section("peers", header, rows, frozenset(urgent))


def _tensors(largest: Largest, most: int) -> Section:
    """Names come last: they are the longest, and of several process groups they are the same."""
    tensors = largest.tensors[:most]
    several = len({t["domain"] for t in tensors}) > 1
    header, *rows = tables.table(
        ("RAW", "RATIO", "RESIDUAL", "CODEC", *(("DOMAIN",) if several else ()), "TENSOR"),
        [
            (human_size(t["bytes_raw"]), tables.ratio(t), tables.residual(t), t["codec"],
             *((t["domain"],) if several else ()), t["name"])
            for t in tensors
        ],
    ).split("\n")  # fmt: skip
    return Section("tensors", f"{header} of {tables.clean(largest.job)}", rows, floor=2, open_ended=True)


# ------------------------------------------------------------------------------------ of two looks
def counted(at: float, status: JSON, peers: JSON, jobs: JSON) -> Counts:
    """``at``: when, seconds of a clock that does not jump."""
    return Counts(
        at,
        status["incarnation"],
        {job["id"]: int(job["step"]) for job in jobs["jobs"] if job["id"]},
        {peer["name"]: peer["bytes_in"] for peer in peers["peers"]},
        {peer["name"]: peer["bytes_out"] for peer in peers["peers"]},
    )


def rates(before: Counts | None, now: Counts) -> Rates:
    """Of what both looks saw, and none that went back: whoever counts has been started again."""
    seconds = now.at - before.at if before is not None and before.life == now.life else 0.0
    if before is None or seconds <= 0:
        return Rates()

    def each(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, float]:
        return {k: (new[k] - count) / seconds for k, count in old.items() if k in new and new[k] >= count}

    return Rates(each(before.steps, now.steps), each(before.came, now.came), each(before.went, now.went))


class Tensors:
    """The largest tensors of the busiest job, asked for now and then. ``ask``: those of a job by its id, at most so
    many; none where they are not to be had."""

    def __init__(self, ask: Callable[[str, int], Sequence[JSON]]) -> None:
        self._ask = ask
        self._job = ""
        self._found: Sequence[JSON] = ()
        self._next = 0.0

    def look(self, jobs: JSON, steps: Mapping[str, float]) -> Largest | None:
        """``steps``: by job id, a second, as far as it is known."""
        here = {job["id"]: job for job in jobs["jobs"] if job["id"] and _elements(job)}
        if not here:
            return None
        if self._job not in here or time.monotonic() >= self._next:
            begin = time.monotonic()
            self._job = max(here, key=lambda i: busy(here[i], steps.get(i, 0.0)))
            self._found = self._ask(self._job, MOST_TENSORS)
            end = time.monotonic()
            self._next = end + max(TENSORS_EVERY, TENSORS_SHARE * (end - begin))
        return Largest(here[self._job]["label"], self._found) if self._found else None


def busy(job: JSON, steps: float) -> tuple[bool, float, int]:
    """What of two jobs the one with more work has more of: whether it runs, elements a second, elements."""
    return job["state"] == "running", steps * _elements(job), _elements(job)


def _elements(job: JSON) -> int:
    return sum(domain["elements"] for domain in job["domains"])


# -------------------------------------------------------------------------------- again and again
def run(
    look: Callable[[], tuple[JSON, JSON, JSON]],
    ask: Callable[[str, int], Sequence[JSON]],
    show: Callable[[str], bool],
    every: float,
    once: bool,
    as_json: bool,
    screen: Callable[[], tuple[int, int]] | None,
) -> None:
    """Look and show until interrupted, until ``show`` says that nobody reads, or ``once``.

    ``look``: status, peers and jobs. ``ask``: see :class:`Tensors`. ``screen``: columns and lines of a terminal, on
    which each look takes the place of the one before it; None: there is none, and looks follow each other whole.

    As JSON every look is one line: ``{"status": ..., "peers": [...], "jobs": [...]}``. Tensors are not in it: scripts
    look often, and `gcctl tensors --json` has all of them.
    """
    before: Counts | None = None
    tensors = Tensors(ask)
    while True:
        status, peers, jobs = look()
        now = counted(time.monotonic(), status, peers, jobs)
        if as_json:
            text = jsonform.text({"status": status, **peers, **jobs})
        else:
            known = rates(before, now)
            largest = tensors.look(jobs, known.steps)
            window = screen if not once else None
            sections = overview(status, peers, jobs, None if once else known, largest, window is not None)
            text = whole(sections) if window is None else _CLEAR + fitted(sections, *window())
        if not show(text) or once:
            return
        before = now
        _sleep(every)


def _sleep(seconds: float) -> None:
    """In short pieces: a signal that comes the moment before a sleep begins does not end that one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
