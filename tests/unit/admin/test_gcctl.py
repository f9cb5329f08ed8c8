"""gcctl against the real service over real gRPC: its tables, its JSON, its exit statuses and its words."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gcserver.admin import convert, gcctl, tables
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_settings import DEFAULT_ADDRESS
from gcserver.admin.source import JobState, JobStatus, PlanRule, TensorStatus
from gcserver.config_keys import BY_NAME
from tests.unit.admin.serving import serving
from tests.unit.admin.source import BIG, JOB, NODE, TENSORS, FixedSource


@dataclass
class Daemon:
    """A service over a FixedSource in a thread of its own, as gcctl finds it."""

    source: FixedSource
    address: str


@pytest.fixture(scope="module")
def server() -> Iterator[Daemon]:
    source = FixedSource()
    with serving(source) as running:
        yield Daemon(source, running.address)


@pytest.fixture
def daemon(server: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    server.source.__init__()  # type: ignore[misc]
    monkeypatch.setenv("GC_NODE_ADMIN", server.address)
    return server


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert gcctl.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def err(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    assert gcctl.main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.usefixtures("daemon")
def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "status")
        == f"""\
node         a
state        serving
version      gradcomm 0.1.0, protocol 1
up for       2 h 5 min
incarnation  {BIG}
listens on   tcp://0.0.0.0:7470, advertised as tcp://10.0.0.1:7470
arenas       3 MiB
planning     6.5 s of CPU time (errors 4 s, start 2.5 s)

LANE  STATE  PID  CORES  RESTARTS  IN     OUT    ROUNDS
   0  ready  411  0-1           1  5 MiB  6 MiB      77

c has waited 12 s to come into job gpt: not there yet: b (restarting)

ERROR           COUNT
frames_corrupt      2
"""
    )


def test_a_daemon_that_has_planned_nothing_says_nothing_of_it() -> None:
    assert "planning" not in tables.status(convert.plain(convert.status(replace(NODE, planning={}))))


@pytest.mark.usefixtures("daemon")
def test_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "peers")
        == """\
PEER  ADDRESS              STATE    SINCE  HEARD       RTT     IN     OUT    RESENT  CORRUPT  ENCRYPTED  REASON
b     tcp://10.0.0.2:7470  up       2 h    250 ms ago  1.2 ms  1 MiB  2 MiB       3        4  yes        -
c     tcp://10.0.0.3:7470  refused  3 min  -           -       0 B    0 B         0        0  no         2 lanes, not 1
"""
    )


@pytest.mark.usefixtures("daemon")
def test_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "jobs")
        == """\
job                gpt (0123456789abcdef0123456789abcdef)
state              running
ranks              3 (a: 0-1; b: 2)
epoch, step, plan  1, 41, 2
on loss            fail, deadline 30 min
DOMAIN  LABEL  SETTLED  VOID  TENSORS  ELEMENTS  CODEC
     0  world       41     1        2      1064  fp16
domain 0 waits 3.5 s for b in step 42: aggregate
"""
    )


def test_no_jobs_and_one_that_joins(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.source.jobs_here = []
    assert out(capsys, "jobs") == "no jobs\n"
    daemon.source.jobs_here = [JobStatus("gpt", "", JobState.JOINING, "ranks 0 are here", world_size=2)]
    assert out(capsys, "jobs").splitlines()[:3] == [
        "job                gpt",
        "state              joining: ranks 0 are here",
        "ranks              2 (-)",
    ]


@pytest.mark.usefixtures("daemon")
def test_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "tensors", "--job", "gpt")
        == """\
TENSOR      DOMAIN  DTYPE    SHAPE  CODEC  RAW    WIRE   RATIO  RESIDUAL
wte.weight  world   float32  64x16  fp16   4 KiB  2 KiB  2x     0
ln.bias     world   float32  40     none   160 B  0 B    -      0.125
"""
    )
    assert out(capsys, "tensors", "--pattern", "ln*").count("\n") == 2
    assert out(capsys, "tensors", "--pattern", "zzz") == "no tensors match\n"


def test_set_codec(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    said = out(capsys, "set-codec", "--job", "gpt", "--pattern", "wte*", "topk(ratio=0.01)")
    assert said == "plan 3 takes effect at step 44 on every node\n"
    assert daemon.source.asked == [("set_codec", "gpt", "wte*", "topk(ratio=0.01)")]


@pytest.mark.usefixtures("daemon")
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        out(capsys, "plan", "--job", "gpt")
        == """\
job      gpt (0123456789abcdef0123456789abcdef)
plan     2, its rules: 1
made by  the planner (auto, fast): measures the link

domain 0 (world): plan 1 since step 12, then plan 2 from step 44
RULE  CODEC             SCHEME  FROM
*     fp16              owner   default
wte*  topk(ratio=0.01)  all     plan
SECTION  TENSORS  FIRST       BLOCKS  SIZE   CODEC             SCHEME  RULE  REASON
      0        7  wte.weight      12  3 MiB  topk(ratio=0.01)  all     wte*  -
      1        1  ln.bias          1  160 B  none              all     -     no rule matches; small: to everyone at once
planned  plan 1
because  6 times as fast as dense
step     expected 250 ms, measured 260 ms
without  compression 1.5 s, any exchange 200 ms (expected)
notches  error budgets 0.5, 1
groups   tensors to bring together: 1, 2; --json has their names and DDP's bucket sizes
TENSORS  FIRST       SIZE   CODEC             SCHEME  EXPECTED  WHY
      7  wte.weight  3 MiB  topk(ratio=0.01)  all     30 ms     the link is the bottleneck
CONSIDERED        STEP    WHY NOT
powersgd(rank=4)  300 ms  slower by 20 %
CONTROLLER  RATIO  NOTCH  DELAY  OF IT SKEW  STEPS
dc2-da2     0.015      1  30 ms  1 ms           55

domain 1 (calls): the defaults, then plan 2 from a step not settled yet
declared lossless: a plan's rules do not apply
"""
    )
    plain = json.loads(out(capsys, "plan", "--json"))
    assert (plain["job"], plain["proposed_version"], plain["rules"][0]["scheme"]) == ("gpt", 2, "all")
    world = plain["domains"][0]
    assert (world["plan_version"], world["since_step"]) == (1, 12)
    assert world["switches"] == [{"first_step": 44, "plan_version": 2}]
    assert [g["rule"] and g["rule"]["origin"] for g in world["groups"]] == ["plan", None]
    assert world["groups"][1]["reason"] == "no rule matches; small: to everyone at once"


def test_set_plan(daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = out(capsys, "set-plan", "--job", "gpt", "--replace", "*=fp16", "wte*=topk(ratio=0.01)@all")
    assert said == "plan 4 takes effect at step 46 on every node\n"
    fp16, topk = PlanRule("*", "fp16"), PlanRule("wte*", "topk(ratio=0.01)", "all")
    assert daemon.source.asked.pop() == ("set_plan", "gpt", (fp16, topk), True)
    file = tmp_path / "plan.json"
    file.write_text('[{"pattern": "*", "codec": "fp16"}]')
    assert json.loads(out(capsys, "set-plan", "--file", str(file), "wte*=topk(ratio=0.01)@all", "--json")) == {
        "plan_version": 4, "effective_step": 46, "message": "takes effect at step 46 on every node",
    }  # fmt: skip
    assert daemon.source.asked.pop() == ("set_plan", "", (fp16, topk), False)
    out(capsys, "set-plan", "--replace")
    assert daemon.source.asked.pop() == ("set_plan", "", (), True)


def test_a_mode_and_rules_of_ones_own_exclude_each_other(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "set-plan", "--mode", "auto", "--quality", "fast") == "plans are made by auto from now on\n"
    assert daemon.source.asked == [("set_mode", "", "auto", "fast")]
    assert "'auto', which makes its own" in err(capsys, Exit.REFUSED, "set-plan", "--mode", "auto", "*=fp16")
    assert "or a mode; got none" in err(capsys, Exit.REFUSED, "set-plan")
    out(capsys, "set-plan", "--mode", "static", "*=fp16")
    assert [a[0] for a in daemon.source.asked] == ["set_mode", "set_plan"], "rules are an operator's by themselves"
    daemon.source.asked.clear()
    assert "zip" in err(capsys, Exit.REFUSED, "set-plan", "--mode", "static", "*=zip")
    assert [a[0] for a in daemon.source.asked] == ["set_plan"], "wrong rules leave the mode as it was"


def test_a_forecast_is_shown_beside_what_was_measured(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "plan")
    for wanted in (
        "the planner (auto, fast): measures the link", "expected 250 ms, measured 260 ms", "6 times as fast as dense",
        "the link is the bottleneck", "slower by 20 %", "error budgets 0.5, 1", "dc2-da2",
        "tensors to bring together: 1, 2; --json",
    ):  # fmt: skip
        assert wanted in text
    forecast = json.loads(out(capsys, "plan", "--json"))["domains"][0]["forecast"]
    assert (forecast["expected_seconds"], forecast["alphas"]) == (0.25, [0.5, 1.0])


def test_replan_says_what_was_decided(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "replan") == "the plan in force stays: 2 % faster is within the noise\n"


def test_a_controller_is_set_with_its_parameters(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "set-controller", "dc2-da2", "k_min=0.001").startswith(
        "plan 5, made after plan 4, takes effect at step 48"
    )
    assert daemon.source.asked == [("set_controller", "", "dc2-da2", {"k_min": 0.001})]
    with pytest.raises(SystemExit):
        gcctl.main(["set-controller", "dc2-da2", "k_min"])
    assert "NAME=VALUE" in capsys.readouterr().err


def test_profile(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "profile")
    for wanted in ("100 Mbit/s", "40 samples", "1.25 times as long", "fp16", "wte.weight", "3.0%"):
        assert wanted in text
    assert json.loads(out(capsys, "profile", "--json"))["domains"][0]["json"] == '{"form": 1}'


def test_advise(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "advise", "100mbit", "1gbit")
    for wanted in ("compress: 6 times as fast", "below 10 Gbit/s", "100 Mbit/s (measured)", "7.50"):
        assert wanted in text
    assert daemon.source.asked == [("advise", "", (12.5e6, 125e6))]
    with pytest.raises(SystemExit):
        gcctl.main(["advise", "fast"])
    assert "such as 100mbit" in capsys.readouterr().err


@pytest.mark.usefixtures("daemon")
def test_where_the_timeline_went(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    assert out(capsys, "plan", "--timeline", str(file)).endswith(f"\ntimeline written to {file}\n")
    assert json.loads(out(capsys, "plan", "--timeline", str(file), "--json"))["job"] == "gpt"


def test_drain(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "drain", "--within", "2m", "--reason", "upgrade") == (
        "stops when the last job has left (1 running)\n"
    )
    assert daemon.source.asked == [("drain", 120.0, "upgrade")]
    assert "state        draining: drained by hand" in out(capsys, "status")


@pytest.mark.usefixtures("daemon")
def test_json_is_whole_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(out(capsys, "--json", "status"))
    assert (status["incarnation"], status["state"], status["errors"]) == (BIG, "serving", {"frames_corrupt": 2})
    peers = json.loads(out(capsys, "peers", "--json"))["peers"]
    assert (peers[0]["state"], peers[0]["rtt_seconds"]) == ("up", 0.0012)
    assert (peers[1]["last_heard_seconds"], peers[1]["bytes_in"]) == (None, 0)
    job = json.loads(out(capsys, "jobs", "--json"))["jobs"][0]
    assert job["domains"][0]["waiting_for"][0]["since_seconds"] == 3.5
    assert job["members"] == [{"node": "a", "ranks": [0, 1]}, {"node": "b", "ranks": [2]}]
    tensors = json.loads(out(capsys, "tensors", "--json"))["tensors"]
    assert [t["name"] for t in tensors] == [t.name for t in TENSORS]
    changed = json.loads(out(capsys, "set-codec", "none", "--json"))
    assert (changed["plan_version"], changed["effective_step"]) == (3, 44)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("set-codec", "topk(ratio=7)"), Exit.REFUSED, "ratio"),
        (("set-codec", "zip"), Exit.REFUSED, "topk"),
        (("set-codec", "--job", "bert", "none"), Exit.NOT_FOUND, "no job 'bert' here; jobs: gpt"),
        (("set-codec", "later"), Exit.UNAVAILABLE, "gcctl: peer b does not answer\n"),
        (("set-plan", "*=fp16", "w*=topk(ratio=7)"), Exit.REFUSED, "rules[1]: rule 'w*': "),
        (("set-plan",), Exit.REFUSED, "rules: expected at least one, replace to go back"),
        (("set-plan", "--job", "bert", "*=fp16"), Exit.NOT_FOUND, "no job 'bert' here; jobs: gpt"),
        (("plan", "--job", "bert"), Exit.NOT_FOUND, "no job 'bert' here; jobs: gpt"),
        (("tensors", "--job", "bert"), Exit.NOT_FOUND, "no job 'bert' here; jobs: gpt"),
    ],
)
def test_what_the_daemon_refuses(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: Exit, part: str
) -> None:
    assert part in err(capsys, status, *arguments)


def test_several_jobs_and_a_defect(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.source.jobs_here = [JobStatus(label, "", JobState.RUNNING) for label in ("gpt", "bert")]
    assert "several jobs match" in err(capsys, Exit.REFUSED, "tensors")
    daemon.source.defect = True
    assert "ZeroDivisionError: of all things" in err(capsys, Exit.FAILED, "status")


def test_nobody_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = err(capsys, Exit.UNREACHABLE, "--address", f"127.0.0.1:{port}", "status")
    assert f"no daemon answers at 127.0.0.1:{port}: check that gcserver runs there" in said
    assert "GC_NODE_ADMIN" in said
    monkeypatch.setenv("GC_NODE_ADMIN", "unix:/does/not/exist.sock")
    assert "no daemon answers at unix:/does/not/exist.sock" in err(capsys, Exit.UNREACHABLE, "status")


def test_somebody_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = err(capsys, Exit.TIMEOUT, "--address", address, "--timeout", "300ms", "status")
    assert address in said


@pytest.mark.usefixtures("daemon")
def test_bytes_that_are_no_letters(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("set-codec", "\udcff"), ("plan", "--job", "\udcff"), ("drain", "--reason", "\udcff")):
        assert "expected text in UTF-8, got '\\udcff'" in err(capsys, Exit.USAGE, *arguments)


def test_a_bad_address_in_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_NODE_ADMIN", "here")
    assert "GC_NODE_ADMIN: expected host:port or unix:/path; got 'here'" in err(capsys, Exit.USAGE, "status")


def test_the_default_address_is_the_daemons() -> None:
    assert BY_NAME["node.admin"].default == DEFAULT_ADDRESS


def test_as_a_process(daemon: Daemon) -> None:
    """The console script, and a reader that goes away early."""
    command = [sys.executable, "-m", "gcserver.admin.gcctl", "--address", daemon.address, "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.splitlines()[1], done.stderr) == (0, "state              running", "")
    reader, writer = os.pipe()
    os.close(reader)
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    gone = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environ, timeout=30, check=False)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (0, b"")


def test_a_name_cannot_drive_the_terminal() -> None:
    evil = TensorStatus("\x1b[2Jw\n", "world", "float32", (), 0, "none", 4)
    text = tables.tensors({"tensors": [{**{s: getattr(evil, s) for s in TensorStatus.__slots__}}]})
    assert "\x1b" not in text and "\\x1b[2Jw\\n" in text and "scalar" in text
    assert text.count("\n") == 1


def test_top(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "top", "--once")
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("gpt")]
    assert row == ["gpt", "running", "41", "-", "b", "aggregate", "42", "3.5", "s"] and "PEER" in shown
    assert (
        """
LANE  STATE  PID  CORES  RESTARTS  IN     OUT    ROUNDS
   0  ready  411  0-1           1  5 MiB  6 MiB      77

RAW    RATIO  RESIDUAL  CODEC  TENSOR of gpt
4 KiB  2x     0         fp16   wte.weight
160 B  -      0.125     none   ln.bias
"""
        in shown
    )
    look = json.loads(out(capsys, "top", "--once", "--json"))
    assert look["status"]["node"] == "a" and look["peers"][0]["name"] == "b"
    assert look["jobs"][0]["domains"][0]["waiting_for"][0]["wanted"] == "aggregate"
    daemon.source.jobs_here = [replace(JOB, id="f" * 32, label="other")]
    daemon.source.tensors_fail = True
    shown = out(capsys, "top", "--once")
    assert "other" in shown and "TENSOR" not in shown
