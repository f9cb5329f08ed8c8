"""What `gcserver doctor` and the start of `gcserver run` say about a machine, and how long the latter may take."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from benchmarks.lab.ports import free_address, free_ports
from gcserver import config, doctor
from gcserver.checks import Check
from gcserver.config import Config
from gcserver.doctor import Need
from tests.unit.test_checks import daemon as daemon  # a fixture


def configured(folder: Path, **flags: str) -> Config:
    """A configuration of its own, on ports that nobody else is given, enough for 32 lanes."""
    own = {
        "node.name": "a",
        "node.listen": f"tcp://127.0.0.1:{free_ports(33)}",
        "node.socket": str(folder / "run" / "d.sock"),
        "node.state": f"/dev/shm/gradcomm-{folder.name}",
        "node.admin": "",
        "node.metrics": "",
    }
    return config.load(flags=own | {name.replace("__", "."): text for name, text in flags.items()})


def fatal(problems: list[Check]) -> str:
    (problem,) = [p for p in problems if p.fatal]
    return f"{problem.text}; {problem.fix}"


def test_nothing_is_wrong_here(tmp_path: Path) -> None:
    assert [p for p in doctor.preflight(configured(tmp_path)) if p.fatal] == []


def test_started_wrong(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"{endpoint} for metrics is in use" in fatal(
            doctor.preflight(configured(tmp_path, node__metrics=endpoint))
        )
    taken_name = configured(tmp_path, node__name="b", cluster__peers="b=tcp://10.0.0.1:1")
    assert "has this node's name" in fatal(doctor.preflight(taken_name))
    assert "60000" in fatal(doctor.preflight(configured(tmp_path, node__cores="60000")))


def test_a_live_daemon_is_named_rather_than_its_ports(tmp_path: Path, daemon: Path) -> None:
    problems = doctor.preflight(configured(tmp_path, node__socket=str(daemon)))
    assert "daemon 'a' at tcp://127.0.0.1:7470 already serves" in fatal(problems)


def test_preflight_takes_less_than_a_second(tmp_path: Path) -> None:
    """Also when something silent holds the socket and there are many lanes."""
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        began = time.monotonic()
        assert doctor.preflight(configured(tmp_path, node__socket=str(path), node__lanes="32"))
        assert time.monotonic() - began < 1
    began = time.monotonic()
    doctor.preflight(configured(tmp_path, node__lanes="32"))
    assert time.monotonic() - began < 1


def test_examine_asks_everything(tmp_path: Path) -> None:
    found = doctor.examine(configured(tmp_path, cluster__peers=f"b={free_address()}"), Need(10**6).parts())
    names = {check.name for check in found}
    assert names == {
        "python", "kernels", "cores", "ports", "socket", "advertise", "state", "keys", "peers", "shared memory",
        "memlock", "open files", "clock", "malloc", "copies", "shared need", "private need",
    }  # fmt: skip
    assert all(check.fix for check in found if check.result != "ok")
    assert all(not check.fix for check in found if check.result == "ok")


def test_the_daemon_that_runs_is_no_trouble(tmp_path: Path, daemon: Path) -> None:
    c = config.load(flags={"node.name": "a", "node.socket": str(daemon)})
    found = {check.name: check for check in doctor.examine(c) if check.name in ("ports", "socket")}
    assert found["ports"].result == "ok" and "the daemon that runs" in found["ports"].text


def test_need_is_counted_from_the_layout() -> None:
    """The formula of docs/memory.md, and what lanes are asked about."""
    parts = Need(27_300_000, local_ranks=4, nodes=3, codec="topk(ratio=0.01)").parts()
    shared = {p.what: p.nbytes for p in parts if p.kind == "shared"}
    assert shared["gradients of 4 local ranks"] == 4 * 4 * 27_300_000 and shared["averages"] == 4 * 27_300_000
    assert doctor.total(parts) == sum(shared.values())
    dense = doctor.total(Need(27_300_000, 4, 3, "none").parts())
    assert 8 * 27_300_000 < doctor.total(parts) - dense < 16 * 27_300_000
    assert doctor.total(parts, "private") > 0
    two = Need(27_300_000, 4, 3, "none", lanes=2).parts()
    assert {p.what.split(",")[0] for p in two} - {p.what.split(",")[0] for p in parts} == {"2 lanes"}


@pytest.mark.parametrize("more", [{"nodes": 0}, {"lanes": 65}, {"parameters": 1 << 41}, {"local_ranks": 0}])
def test_no_such_job(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        Need(**{"parameters": 1000, **more})


@pytest.mark.parametrize(
    ("text", "count"),
    [("124000000", 124_000_000), ("124M", 124_000_000), ("1.3e9", 1_300_000_000), ("7B", 7 * 10**9), ("10k", 10_000)],
)
def test_numbers_of_parameters(text: str, count: int) -> None:
    assert doctor.read_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "many", "1e999", "7 billion"])
def test_no_numbers_of_parameters(text: str) -> None:
    with pytest.raises(ValueError):
        Need(doctor.read_count(text))


def test_both_ways_to_show_it() -> None:
    found = [
        Check("ports", "ok", "free"),
        Check("clock", "warn", "off", "set it"),
        Check("cores", "fail", "none", "give"),
    ]
    assert doctor.as_text(found).splitlines() == [
        "ok    ports  free",
        "warn  clock  off",
        "             -> set it",
        "fail  cores  none",
        "             -> give",
        "3 checks, 1 failed, 1 warning",
    ]
    parts = Need(1000).parts()
    document = json.loads(doctor.as_json(found, parts))
    assert document["ok"] is False
    assert document["checks"][1] == {"name": "clock", "result": "warn", "text": "off", "fix": "set it"}
    need = document["need"]
    assert (need["shared"], need["private"]) == (doctor.total(parts), doctor.total(parts, "private"))
    assert need["parts"][0] == {"what": "gradients of 1 local rank", "kind": "shared", "bytes": 4000, "exact": True}
