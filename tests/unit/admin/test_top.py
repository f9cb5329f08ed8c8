"""`gcctl top`: whom jobs wait for, links, lanes and tensors, as tables and as JSON, once and again and again.

What may live here: tests of `gcserver/admin/top.py`. What may not: how a daemon is asked (`test_gcctl.py`), what fits a
window (`test_sections.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gcserver.admin import top
from gcserver.admin.sections import fitted, whole

LANE = {
    "index": 0, "state": "ready", "pid": 411, "cores": [0, 1], "restarts": 1, "bytes_in": 5 << 20,
    "bytes_out": 6 << 20, "rounds": 77,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "node": "a", "state": "serving", "reason": "", "uptime_seconds": 7500.0, "applicants": [], "incarnation": 5,
    "lanes": [],
}  # fmt: skip
PEERS: dict[str, Any] = {"peers": []}
TENSORS = [
    {"name": "wte.weight", "domain": "ddp.0", "codec": "topk(ratio=0.01)", "bytes_raw": 3 << 20,
     "bytes_wire": 3 << 15, "residual_norm": 0.125},
    {"name": "ln.bias", "domain": "ddp.0", "codec": "none", "bytes_raw": 160, "bytes_wire": 0, "residual_norm": 0.0},
]  # fmt: skip


def wait(node: str, wanted: str, seconds: float, step: int = 0) -> dict[str, Any]:
    return {"node": node, "wanted": wanted, "since_seconds": seconds, "step": step, "reason": "exchange"}


def job(
    step: int, *of_steps: dict[str, Any], label: str = "gpt", own: tuple[dict[str, Any], ...] = (), elements: int = 0
) -> dict[str, Any]:
    domains = [{"waiting_for": list(of_steps), "elements": elements}]
    return {"label": label, "id": label * 3, "state": "running", "step": step, "domains": domains, "waiting_for": own}


def peer(name: str = "b", came: int = 0, went: int = 0, state: str = "up", reason: str = "") -> dict[str, Any]:
    return {
        "name": name, "address": f"tcp://{name}:1", "state": state, "last_heard_seconds": 0.25, "rtt_seconds": None,
        "bytes_in": came, "bytes_out": went, "frames_resent": 3, "frames_corrupt": 0, "encrypted": False,
        "reason": reason, "since_seconds": 90.0,
    }  # fmt: skip


def shown(
    status: dict[str, Any] = STATUS,
    peers: dict[str, Any] = PEERS,
    jobs: Sequence[dict[str, Any]] = (),
    rates: top.Rates | None = None,
    largest: top.Largest | None = None,
    window: bool = False,
) -> str:
    return whole(top.overview(status, peers, {"jobs": jobs}, rates, largest, window))


class Watch:
    """A clock that goes on while `gcctl top` pauses, ``looks`` one after the other, and what was printed of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: tuple[dict[str, Any], ...]) -> None:
        self.now, self.looks, self.printed = 10.0, list(looks), list[str]()
        #: (when, which job) tensors were asked of, and what that came to, after how many seconds
        self.asked: list[tuple[float, str]] = []
        self.tensors: Callable[[str], list[dict[str, Any]]] = lambda job: TENSORS
        self.takes = 0.0
        monkeypatch.setattr(top.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(top.time, "sleep", self._pause)

    def _pause(self, seconds: float) -> None:
        self.now += seconds

    def _ask(self, job: str, most: int) -> list[dict[str, Any]]:
        self.asked.append((self.now, job))
        self.now += self.takes
        return self.tensors(job)[:most]

    def _show(self, text: str) -> bool:
        self.printed.append(text)
        return bool(self.looks)

    def run(self, once: bool = False, as_json: bool = False, window: tuple[int, int] | None = (80, 24)) -> list[str]:
        screen = (lambda: window) if window else None
        top.run(lambda: self.looks.pop(0), self._ask, self._show, 2.0, once, as_json, screen)
        return self.printed


def test_who_is_waited_for_longest_comes_first() -> None:
    gpt = job(
        41,
        wait("b", "aggregate", 3.5, 42),
        wait("c", "contribution", 8.0, 42),
        own=(wait("rank 2", "connection", 5.0),),
    )
    known = top.Rates({"gptgptgpt": 12.34, "cnncnncnn": 152.4})
    assert shown(jobs=[gpt, job(7, label="cnn")], rates=known).splitlines() == [
        "a  serving  up 2 h 5 min",
        "",
        "JOB  STATE    STEP  STEPS/S  WAITS FOR  TO SEND       STEP  SINCE",
        "gpt  running  41    12       c          contribution  42    8 s",
        "-    -        -     -        rank 2     connection    -     5 s",
        "-    -        -     -        b          aggregate     42    3.5 s",
        "cnn  running  7     152      -          -             -     -",
    ]


def test_without_jobs_and_with_peers() -> None:
    text = shown(STATUS | {"state": "degraded", "reason": "lane 0 is silent"}, {"peers": [peer()]})
    assert "a  degraded: lane 0 is silent" in text and "no jobs" in text
    assert "tcp://b:1" in text and "1 min 30 s" in text and "/S" not in text.split("\n", 4)[4]


def test_who_waits_to_come_in_is_shown() -> None:
    waits = {"node": "c", "job": "gpt", "since_seconds": 12.0, "reason": "not there yet: b\x1b[2J"}
    text = shown(STATUS | {"applicants": [waits]})
    assert "c has waited 12 s to come into job gpt: not there yet: b\\x1b[2J" in text


def test_all_of_a_node_is_in_the_usual_window() -> None:
    """Within 80 columns there is nothing that matters behind the last of them."""
    peers = {"peers": [peer("b"), peer("c", state="restarting", reason="nothing heard for 12 s; no connection\x1b[2J")]}
    known = top.Rates({"gptgptgpt": 12.34}, {"b": 1.5 * 2**20}, {"b": 2.5 * 2**30})
    look = top.overview(
        STATUS | {"lanes": [LANE]}, peers, {"jobs": [job(41)]}, known, top.Largest("g\x1bpt", TENSORS), True
    )
    text = fitted(look, 80, 24)
    assert text == whole(look)
    assert text.splitlines()[2:] == [
        "JOB  STATE    STEP  STEPS/S  WAITS FOR  TO SEND  STEP  SINCE",
        "gpt  running    41  12       -          -        -     -",
        "",
        "PEER  STATE       SINCE       RTT  IN/S     OUT/S    RESENT  CORRUPT",
        "b     up          1 min 30 s  -    1.5 MiB  2.5 GiB       3        0",
        "c     restarting  1 min 30 s  -    -        -             3        0",
        "  nothing heard for 12 s; no connection\\x1b[2J",
        "",
        "LANE  STATE  PID  CORES  RESTARTS  IN     OUT    ROUNDS",
        "   0  ready  411  0-1           1  5 MiB  6 MiB      77",
        "",
        "RAW    RATIO  RESIDUAL  CODEC             TENSOR of g\\x1bpt",
        "3 MiB  32x    0.125     topk(ratio=0.01)  wte.weight",
        "160 B  -      0         none              ln.bias",
    ]


def test_what_is_wrong_stays_where_not_everything_fits() -> None:
    lanes = [LANE | {"index": i, "state": "silent" if i == 30 else "ready"} for i in range(32)]
    peers = {"peers": [peer(f"n{i}", state="dead" if i == 20 else "up", reason="gone" * (i == 20)) for i in range(30)]}
    jobs = [job(i, *[wait("n20", "push", 9.0)] * (i == 15), label=f"j{i}") for i in range(20)]
    rows = fitted(
        top.overview(STATUS | {"lanes": lanes}, peers, {"jobs": jobs}, None, top.Largest("j1", TENSORS), True), 80, 24
    ).split("\n")
    kept = [row.split()[0] for row in rows if row and not row.startswith("...")]
    assert len(rows) == 23
    assert kept == [
        "a",
        "JOB",
        "j0",
        "j1",
        "j2",
        "j3",
        "j4",
        "j15",
        "PEER",
        "n20",
        "gone",
        "LANE",
        "30",
        "RAW",
        "3",
        "160",
    ]


def test_tensors_of_several_process_groups_say_of_which() -> None:
    text = shown(largest=top.Largest("gpt", [*TENSORS, TENSORS[0] | {"domain": "exact"}] * 7))
    header, *rows = text.split("\n\n")[-1].split("\n")
    assert header.split() == ["RAW", "RATIO", "RESIDUAL", "CODEC", "DOMAIN", "TENSOR", "of", "gpt"]
    assert len(rows) == top.SOME_TENSORS and rows[2].endswith("  exact   wte.weight")


def test_rates_come_of_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [
        (STATUS, {"peers": [peer(came=n << 20, went=n << 10)]}, {"jobs": [job(step)]})
        for n, step in ((4, 40), (6, 50), (16, 60))
    ]
    printed = Watch(monkeypatch, *looks).run()
    assert all(text.startswith("\x1b[H\x1b[2J") for text in printed)
    rows = [line.split() for text in printed for line in text.splitlines()]
    assert [row[2:4] for row in rows if row[:1] == ["gpt"]] == [["40", "-"], ["50", "5"], ["60", "5"]]
    assert [row[6:-2] for row in rows if row[:1] == ["b"]] == [
        ["-", "-", "-"], ["-", "1", "MiB", "1", "KiB"], ["-", "5", "MiB", "5", "KiB"],
    ]  # fmt: skip


def test_without_a_window_rates_stand_beside_what_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(STATUS, {"peers": [peer(came=n << 20)]}, {"jobs": []}) for n in (4, 6)]
    header, row = Watch(monkeypatch, *looks).run(window=None)[1].splitlines()[-2:]
    assert header.split()[6:11] == ["IN", "OUT", "IN/S", "OUT/S", "RESENT"]
    assert row.endswith("6 MiB  0 B  1 MiB  0 B         3        0  no         -")


def test_what_began_to_count_again_has_no_rate() -> None:
    before = top.counted(1.0, STATUS, {"peers": [peer(came=9, went=4)]}, {"jobs": [job(7), job(9, label="cnn")]})
    now = top.counted(3.0, STATUS, {"peers": [peer(came=8, went=8), peer("c")]}, {"jobs": [job(9)]})
    assert top.rates(before, now) == top.Rates({"gptgptgpt": 1.0}, {}, {"b": 2.0})
    another = top.counted(3.0, STATUS | {"incarnation": 6}, {"peers": [peer(came=10)]}, {"jobs": [job(9)]})
    assert top.rates(before, another) == top.rates(before, before) == top.rates(None, now) == top.Rates()


def test_tensors_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, *[(STATUS, PEERS, {"jobs": [job(1, elements=8)]})] * 11)
    printed = watch.run()
    assert all("wte.weight" in text for text in printed)
    assert [when for when, _ in watch.asked] == pytest.approx([10.0, 20.0, 30.0])
    assert {name for _, name in watch.asked} == {"gptgptgpt"}


def test_those_that_take_long_are_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, *[(STATUS, PEERS, {"jobs": [job(1, elements=8)]})] * 15)
    watch.takes, watch.tensors = 1.0, lambda job: []
    printed = watch.run()
    assert not any("TENSOR" in text for text in printed), "those of a lane that does not answer are not there"
    assert [when for when, _ in watch.asked] == pytest.approx([10.0, 31.0])


def test_the_busiest_job_is_the_one_that_sends_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first look the largest; one that ends makes way at once."""
    joining = job(0, label="new") | {"id": ""}
    failed = job(99, label="bad", elements=10**9) | {"state": "failed"}

    def look(at: int) -> tuple[dict[str, Any], ...]:
        here = [joining, failed, job(100 * at, label="cnn", elements=10), job(at, elements=100)]
        return STATUS, PEERS, {"jobs": here[: 3 if at == 7 else 4]}

    watch = Watch(monkeypatch, *map(look, range(7)), (STATUS, PEERS, {"jobs": [joining, job(7, elements=1)]}))
    printed = watch.run()
    assert [name for _, name in watch.asked] == ["gptgptgpt", "cnncnncnn", "gptgptgpt"]
    assert "TENSOR of gpt" in printed[4] and "TENSOR of cnn" in printed[5] and "TENSOR of gpt" in printed[7]
    assert top.Tensors(lambda job, most: TENSORS).look({"jobs": [joining]}, {}) is None


def test_one_look_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = Watch(monkeypatch, (STATUS, PEERS, {"jobs": [job(1, elements=8)]})).run(once=True)
    assert text.endswith("none              ln.bias") and not text.startswith("\x1b")


def test_as_json_a_look_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, (STATUS, PEERS, {"jobs": [job(4, elements=8)]}))
    (text,) = watch.run(once=True, as_json=True)
    assert json.loads(text) == {"status": STATUS, "peers": [], "jobs": [job(4, elements=8) | {"waiting_for": []}]}
    assert "\n" not in text and watch.asked == [], "scripts that look often ask for no tensors"
