"""The network lab: links carry what they are shaped to, both ways, and nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab import netns, processes
from tests.soak.injectors import fill

pytestmark = pytest.mark.system

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5201))
print("up", flush=True)
buffer = bytearray(1 << 20)
while True:
    peer, _ = server.accept()
    total, start = 0, time.perf_counter()
    peer.sendall(b"g")
    while n := peer.recv_into(buffer):
        total += n
    print(total * 8 / (time.perf_counter() - start), flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5201))
peer.recv(1)  # what is sent before the other side looks at its clock would come for nothing
peer.sendall(bytes(int(sys.argv[2])))
peer.close()
"""


def need(means: netns.Means) -> None:
    if means == "root" and os.geteuid() != 0:
        pytest.skip("not root")
    try:
        with netns.Lab(1, "100mbit", means=means):
            pass
    except netns.LabError as error:
        pytest.skip(f"no lab by {means} here: {error}")


class Receiver:
    """Bits per second that arrive on a host."""

    def __init__(self, host: netns.Host) -> None:
        self.host = host
        self.process = host.start([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert self.line() == "up"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def best(self, sender: netns.Host, nbytes: int, rate: float, least: float = 0.96) -> float:
        """How much of 95.6 % of ``rate`` arrives, the share of payload; faster is never right.

        The machine may be busy with something else: one of twenty attempts that gets ``least`` is enough.
        """
        best = 0.0
        for _ in range(20):
            got = self.measure(sender, nbytes) / (0.9564 * rate)
            assert got < 1.04  # the bucket of 32 KiB passes at once
            best = max(best, got)
            if best > least:
                break
        return best

    def measure(self, sender: netns.Host, nbytes: int) -> float:
        client = sender.start([sys.executable, "-c", SEND, self.host.address, str(nbytes)])
        try:
            return float(self.line())
        finally:
            processes.end([client])


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Network namespaces, other than our own, of processes that were started in this test, by whomever. Other tests
    make some at the same time: ours inherit a mark."""
    mark = f"NETNS_UNDER_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))

    def look() -> set[str]:
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found.add(os.readlink(f"/proc/{entry}/ns/net"))
                except OSError:
                    pass
        return found - {os.readlink("/proc/self/ns/net")}

    return look


def eventually(true: Callable[[], bool], within: float = 30.0) -> bool:
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("means", ["root", "userns"])
def test_links_reach_their_rate_both_ways_and_follow_a_change(means: netns.Means) -> None:
    need(means)
    with netns.Lab(3, "100mbit", means=means) as lab:
        receivers = [Receiver(host) for host in lab.hosts[:2]]
        try:
            for receiver, sender in ((receivers[0], lab.hosts[2]), (receivers[1], lab.hosts[0])):
                assert receiver.best(sender, 6_000_000, 100e6) > 0.96
            lab.set_rate("400mbit")
            # This bucket is full after a millisecond: what a busy machine does not send within it is never sent.
            assert receivers[0].best(lab.hosts[1], 24_000_000, 400e6, 0.5) > 0.5
            lab.set_rate(None)
            lab.set_rate(None)
            assert max(receivers[0].measure(lab.hosts[1], 100_000_000) for _ in range(3)) > 1.5 * 400e6
            lab.set_rate("50mbit")
            assert receivers[0].best(lab.hosts[1], 3_000_000, 50e6) > 0.96
        finally:
            processes.end([r.process for r in receivers])


@pytest.mark.parametrize("means", ["root", "userns"])
def test_nothing_is_left_behind(means: netns.Means, namespaces: Callable[[], set[str]]) -> None:
    need(means)
    assert eventually(lambda: not namespaces())
    interfaces = set(os.listdir("/sys/class/net"))
    with netns.Lab(2, "100mbit", means=means) as one, netns.Lab(2, "1gbit", means=means) as two:
        assert one.hosts[0].address == two.hosts[0].address  # side by side, without names or addresses of their own
        assert len(namespaces()) == 6
    assert eventually(lambda: not namespaces())
    with pytest.raises(KeyboardInterrupt), netns.Lab(2, "100mbit", means=means):
        raise KeyboardInterrupt
    assert eventually(lambda: not namespaces())
    assert set(os.listdir("/sys/class/net")) == interfaces


@pytest.mark.parametrize("means", ["root", "userns"])
def test_hosts_share_memory_of_their_own(means: netns.Means) -> None:
    need(means)
    with netns.Lab(2, "100mbit", means=means) as lab:
        hosts, shared = lab.shared_memory(8 << 20)
        assert list(shared.iterdir()) == []
        name = f"gradcomm-test-{os.getpid()}"
        for host, command in zip(hosts, ("mkdir", "test -d"), strict=True):
            subprocess.run(host.command([*command.split(), f"/dev/shm/{name}"]), check=True)
        assert [p.name for p in shared.iterdir()] == [name]
        assert not Path("/dev/shm", name).exists()
        assert subprocess.run(lab.hosts[0].command(["test", "-d", f"/dev/shm/{name}"]), check=False).returncode == 1
        taken = fill(shared / "ballast")
        assert taken == 8 << 20
        with (shared / "more").open("wb") as file, pytest.raises(OSError, match="No space"):
            os.posix_fallocate(file.fileno(), 0, 4096)
        connect = [sys.executable, "-c", SEND, lab.hosts[1].address, "1000"]
        receiver = Receiver(lab.hosts[1])
        try:
            assert hosts[0].start(connect).wait(20) == 0  # on the same network as before
        finally:
            processes.end([receiver.process])


HOLD = """
import subprocess, sys
from benchmarks.lab import netns, processes
with processes.exits_on_signals(), netns.Lab(2, "100mbit") as lab:
    inside = lab.hosts[1].start([sys.executable, "-c", "print('inside', flush=True); import time; time.sleep(600)"])
    print("held", flush=True)
    inside.wait()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_takes_the_lab_away(signum: signal.Signals, namespaces: Callable[[], set[str]]) -> None:
    if netns.shaping() is None:
        pytest.skip(netns.probe().reason)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    assert {holder.stdout.readline().strip(), holder.stdout.readline().strip()} == {"held", "inside"}
    assert len(namespaces()) == 3
    holder.send_signal(signum)
    holder.wait(60)
    assert eventually(lambda: not namespaces())


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(processes, "SBIN", ())
    netns.probe.cache_clear()
    try:
        assert netns.shaping() is None
        assert "ip (iproute2)" in netns.probe().reason
        with netns.open_lab(2, "100mbit") as lab:
            assert lab.means is None
        with pytest.raises(netns.LabError, match="iproute2"):
            netns.Lab(2)
    finally:
        netns.probe.cache_clear()
