"""A peer that ends with large payloads under way, in whichever manner, ends no other process.

What may live here: two processes with a transport each, of which one is killed, resets or closes again and again. What
may not: what arrives (`test_ucx.py`), daemons (`test_ucx_daemons.py`). Needs the system's libucp (Debian's libucx0).

Who is to survive sleeps between turns of its loop, so that what the other sent last is found when the other is gone.
UCX aborts where it finds what it did not expect; so a survivor is asked how it ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab.ports import free_address
from tests.system.ucx import needs_ucx
from tests.system.ucx import tls as tls  # a fixture

pytestmark = [pytest.mark.system, pytest.mark.slow, needs_ucx]

#: Lives of the one that ends.
LIVES = 6

#: Arguments: the role (or how it ends), whether it sends, its address, the other's, and a file that ends who stays.
NODE = f"""
import os, signal, sys, time
from gcproto.wire import HEADER_BYTES
from gcserver.parent import ends_with_parent
from gcserver.runtime.ucxtransport import UcxTransport

ends_with_parent(9)
role, sends, mine, other, enough = sys.argv[1:]

def begin():
    transport = UcxTransport(mine)
    transport.open(1, other)
    return transport

def turn(transport):
    transport.tick(time.monotonic())
    return len(list(transport.receive()))

def fill(transport):
    to = transport._peers[1]
    if sends == "sends" and to.up and not to.end.busy:
        for _ in range(30):
            # Memory of its own, which goes with the connection.
            transport.send(1, bytes(HEADER_BYTES), bytes(5 << 20))

transport = begin()
print("ready", flush=True)
while role == "stay" and not os.path.exists(enough):
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        fill(transport)
        turn(transport)
    time.sleep(0.05)
for life in range(0 if role == "stay" else 1 if role == "kill" else {LIVES}):
    end = time.monotonic() + 60
    while not transport._peers[1].up:
        turn(transport)
        assert time.monotonic() < end
    # In the course of it, or with all of it before the other.
    fill(transport)
    for _ in range(life % 3 + 1):
        turn(transport)
    if role == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif role == "reset":
        transport.reset(1)
    else:
        transport.close()
        transport = begin()
transport.close()
"""

#: What goes before, for a process that takes its time between giving up a listener and the worker: who dials meanwhile
#: is heard by UCX's own thread, which looks at the listener. Without delay that is one connection in many.
SLOW = """
import time
from gcserver.runtime import ucp

class Slow:
    def __getattr__(self, name):
        call = getattr(library.ucp, name)
        return call if name != "ucp_listener_destroy" else lambda listener: (call(listener), time.sleep(0.05))

library = ucp.load()
slow = library._replace(ucp=Slow())
ucp.load = lambda: slow
"""


def start(role: str, sends: bool, mine: str, other: str, enough: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", before + NODE, role, "sends" if sends else "listens", mine, other, str(enough)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def play(how: str, senders: str, folder: Path, before: str = "") -> list[tuple[int, str]]:
    """How each process ended that was to survive, and what it said: the one that stays last."""
    here, there, enough = free_address(), free_address(), folder / "enough"
    stays = start("stay", senders != "the one that ends", here, there, enough)
    assert stays.stdout is not None
    stays.stdout.readline()
    ended = []
    for _ in range(LIVES if how == "kill" else 1):
        if stays.poll() is not None:
            break
        ends = start(how, senders != "the one that stays", there, here, enough, before)
        said = ends.communicate(timeout=100)[1]
        if ends.returncode != -signal.SIGKILL:
            ended.append((ends.returncode, said))
    enough.touch()
    said = stays.communicate(timeout=100)[1]
    return [*ended, (stays.returncode, said)]


def survived(ended: list[tuple[int, str]]) -> None:
    """UCX says at length what it found, and all of it is wanted."""
    assert all(status == 0 for status, _ in ended), "\n".join(f"ended with {status}: {said}" for status, said in ended)


@pytest.mark.parametrize("senders", ["the one that ends", "the one that stays", "both"])
@pytest.mark.parametrize("how", ["kill", "reset", "close"])
def test_whoever_ends_under_load_ends_nobody_else(how: str, senders: str, tls: str, tmp_path: Path) -> None:
    survived(play(how, senders, tmp_path))


def test_who_is_just_dialling_a_listener_that_is_given_up_ends_nobody(tls: str, tmp_path: Path) -> None:
    for turn in range(8):
        (folder := tmp_path / str(turn)).mkdir()
        survived(play("close", "the one that stays", folder, SLOW))


def test_no_connection_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that ends in that moment would end the one that waits, once in hundreds of times: so none may wait."""
    for variable, value in ("TLS", "tcp"), ("LOG_LEVEL", "debug"), ("LOG_FILE", str(tmp_path / "%p.log")):
        monkeypatch.setenv(f"UCX_{variable}", value)
    survived(play("close", "the one that stays", tmp_path))
    said = "".join(log.read_text() for log in tmp_path.glob("*.log")).splitlines()
    connected = [line for line in said if "connect(fd=" in line]
    # Both dial, in each life: UCX's greetings, and the connection of one of the two ends.
    assert len(connected) >= 2 * LIVES
    assert all(line.endswith("Operation now in progress") for line in connected), "\n".join(connected)


@pytest.mark.parametrize("how", ["kill", "reset", "close"])
def test_shared_memory_alone_which_would_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")
    for status, said in play(how, "the one that ends", tmp_path):
        assert status == 1 and "UcpRefused: UCX_TLS=sm,self names shared memory only" in said, (status, said)
