"""What becomes of gcctl's words where stdout or stderr is closed, full, without a reader, or has no such letters.

What may live here: tests of `gcserver/admin/gcctl_output.py`, in processes of their own, and of Ctrl-C at those. What
may not: what the words are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcserver.admin.exits import Exit
from tests.unit.admin.serving import serving
from tests.unit.admin.source import FixedSource

NAME = "café☕"


def gcctl(redirect: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """`gcctl` as a shell starts it with ``redirect``."""
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "gcserver.admin.gcctl", *arguments]
    known = {name: text for name, text in os.environ.items() if name not in ("PYTHONUNBUFFERED", "PYTHONIOENCODING")}
    return subprocess.run(command, capture_output=True, env={**known, **environ}, timeout=60, check=False)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / f"{NAME}.toml"
    path.write_text('[contexts.a]\naddress = "a:1"\n')
    return str(path)


def test_a_disk_that_is_full(file: str) -> None:
    done = gcctl(">/dev/full", "context", "list", GCCTL_CONFIG=file)
    said = b"gcctl: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (Exit.FAILED, said)


def test_nobody_listens(file: str) -> None:
    for command in (("context", "list"), ("--address", "127.0.0.1:1", "top", "--once")):
        done = gcctl(">&-", *command, GCCTL_CONFIG=file)
        assert done.returncode == (Exit.OK if command[0] == "context" else Exit.UNREACHABLE)
        assert b"Traceback" not in done.stderr
    done = gcctl("2>&-", "context", "show", "b", GCCTL_CONFIG=file)
    assert (done.returncode, done.stdout) == (Exit.USAGE, b""), "an error is no answer"
    assert gcctl("2>/dev/full", "context", "show", "b", GCCTL_CONFIG=file).returncode == Exit.USAGE


def test_letters_that_the_terminal_has_not(file: str) -> None:
    done = gcctl("", "context", "list", "--json", GCCTL_CONFIG=file, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (Exit.OK, b"")
    assert json.loads(done.stdout)["file"] == file and b"caf\\u00e9" in done.stdout
    done = gcctl("", "context", "use", "a", GCCTL_CONFIG=file, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.isascii()) == (Exit.OK, True)


def test_a_path_that_is_no_text(file: str) -> None:
    odd = os.fsdecode(os.fsencode(file) + b"\xff\x1b[2J")
    os.rename(file, odd)
    for command in ("context list --json", "context use a", "context show b"):
        done = gcctl("", *command.split(), GCCTL_CONFIG=odd)
        assert b"Traceback" not in done.stderr and b"\x1b" not in done.stdout + done.stderr
        assert done.returncode == (Exit.USAGE if command.endswith("b") else Exit.OK)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`gcctl`, which is ended where it has not ended itself."""
    command = [sys.executable, "-m", "gcserver.admin.gcctl", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Status and stderr of a process at which somebody presses Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    return process.returncode, err


def test_ctrl_c_between_two_looks() -> None:
    with serving(FixedSource()) as server:
        arguments = ("--address", server.address, "--timeout", "100s", "top", "--every", "1h", "--json")
        with running(*arguments) as looking:
            assert looking.stdout is not None and looking.stdout.readline().startswith(b'{"status":')
            assert interrupted(looking) == (Exit.INTERRUPTED, b"gcctl: interrupted\n")


def test_ctrl_c_while_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with running("--address", address, "--timeout", "1h", "status") as waiting, silent.accept()[0]:
            assert interrupted(waiting) == (Exit.INTERRUPTED, b"gcctl: interrupted\n")
