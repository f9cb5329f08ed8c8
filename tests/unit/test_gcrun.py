"""The command's process under gcrun: its environment, its signals, its end."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gcserver import gcrun
from gcserver.copies import VARIABLE, around_caches
from gcserver.private import Private

ROOT = Path(__file__).resolve().parents[2]
#: gcrun with a daemon that is a sleeping process.
MAIN = """
import os, subprocess, sys
from pathlib import Path
from gcserver import gcrun, private

def start(flags, environ, file):
    if flags.get("codec.default") == "none":
        raise private.StartError("no daemon today")
    if flags.get("codec.default") == "fp16":
        os.kill(os.getpid(), 2)
    hold, end = os.pipe()
    keeper = subprocess.Popen(["sh", "-c", "read x <&%d; echo kept > kept" % hold], pass_fds=(hold,))
    return private.Private(Path("/run/job"), end, keeper, "unix:/run/job/admin.sock", ())

private.start = start
sys.exit(gcrun.main(sys.argv[1:]))
"""


def _start(folder: Path, *arguments: str, terminal: int = -1, **variables: str) -> subprocess.Popen[str]:
    """``terminal``: the inner end of one that is to control the process."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GC_")}

    def prepare() -> None:
        # Tests that run in the background ignore it, which children inherit and sh cannot undo.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if terminal >= 0:
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environ, "PYTHONPATH": str(ROOT), **variables}, preexec_fn=prepare,
    )  # fmt: skip


def test_the_command_has_the_daemons_address_and_its_own_status(tmp_path: Path) -> None:
    run = _start(
        tmp_path, "--node.lanes", "2", "--", "sh", "-c", "echo $GC_NODE_SOCKET $GC_NODE_ADMIN $1; exit 3", "x", "--y"
    )
    out, err = run.communicate(timeout=30)
    assert (out.split(), err, run.returncode) == (["/run/job/daemon.sock", "unix:/run/job/admin.sock", "--y"], "", 3)
    assert (tmp_path / "kept").exists(), "it has waited for the daemon's end"


def test_the_command_copies_blocks_around_the_caches_unless_told_otherwise(tmp_path: Path) -> None:
    own = "glibc.cpu.x86_non_temporal_threshold=8388608"
    for given, told in (("", around_caches({}).get(VARIABLE, "")), (own, own)):
        run = _start(tmp_path, "--", "sh", "-c", f"echo ${VARIABLE}", **{VARIABLE: given})
        assert run.communicate(timeout=30)[0].strip() == told


def test_a_command_that_a_signal_ends_ends_gcrun_by_the_same(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        run = _start(tmp_path, "sh", "-c", f"kill -{number} $$")
        assert (run.wait(30), run.communicate()[1]) == (-number, "")


def test_signals_are_passed_on(tmp_path: Path) -> None:
    script = "trap 'echo usr1' USR1; trap 'echo term; exit 4' TERM; echo ready; while :; do sleep 0.01; done"
    run = _start(tmp_path, "--", "sh", "-c", script)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGUSR1)
    assert run.stdout.readline() == "usr1\n"
    run.terminate()
    assert run.communicate(timeout=30)[0] == "term\n"
    assert run.returncode == 4


def test_what_a_terminal_sends_reaches_the_command_once(tmp_path: Path) -> None:
    """Both are in the terminal's foreground: passing it on would be the second time."""
    script = (
        "trap 'n=$((n+1)); echo interrupted' INT; trap 'echo $n; exit 5' USR1; echo ready; while :; do sleep 0.01; done"
    )
    terminal, inside = pty.openpty()
    try:
        run = _start(tmp_path, "--", "sh", "-c", script, terminal=inside)
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        os.write(terminal, b"\x03")
        assert run.stdout.readline() == "interrupted\n"
        run.send_signal(signal.SIGUSR1)
        assert run.communicate(timeout=30)[0] == "1\n"
        assert run.returncode == 5
    finally:
        os.close(terminal)
        os.close(inside)


def test_the_command_ends_with_gcrun(tmp_path: Path) -> None:
    run = _start(tmp_path, "--", "sh", "-c", "echo $$; exec sleep 60")
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    run.kill()
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    run.communicate()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--", "/no/such/command"], 127, "No such file"),
        (["--", "/"], 126, "Permission denied"),
        (["--codec.default", "none", "--", "true"], 1, "no daemon today"),
        (["--codec.default", "fp16", "--", "true"], 130, "gcrun: interrupted\n"),
        (["--node.lanes", "2"], 2, "expected a command"),
        (["--node.lane", "2", "--", "true"], 2, "node.lane"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    run = _start(tmp_path, *arguments)
    _, err = run.communicate(timeout=30)
    assert run.returncode == status and said in err and "Traceback" not in err, err


def test_a_command_that_cannot_be_run_leaves_signals_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the daemon, which is waited for, can then be interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    keeper = subprocess.Popen([sys.executable, "-c", ""])
    assert gcrun._run(["/no/such/command"], Private(Path("/run/job"), -1, keeper, "", ())) == 127
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    keeper.wait()
    assert "No such file" in capsys.readouterr().err


def test_disabled_it_is_the_command(tmp_path: Path) -> None:
    run = _start(tmp_path, "--", "sh", "-c", "echo $$ ${GC_NODE_SOCKET-none}", GC_DISABLE="1")
    assert run.communicate(timeout=30)[0] == f"{run.pid} none\n"
    wrong = _start(tmp_path, "true", GC_DISABLE="perhaps")
    assert "GC_DISABLE=perhaps" in wrong.communicate(timeout=30)[1] and wrong.returncode == 2


def test_help_names_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gcrun.main(["--help"])
    assert ended.value.code == 0
    assert "--node.listen" in capsys.readouterr().out
