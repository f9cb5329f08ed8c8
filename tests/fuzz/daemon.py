"""Target: running daemons, through the sockets that they have: workers' and lanes', peers' ports, gRPC and metrics.

An input is where to knock and what to send in which way. It is followed by a question that the daemon has to answer;
at the end a real job of two nodes runs. Who a frame says to be from is a node that nobody knows, or a former life of
one: without keys (docs/security.md) whoever reaches the port could say to be a later one, and shut it out.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from benchmarks.lab.ports import free_ports
from gcproto import advice, lane_messages, messages, packed, wire
from gcproto.channel import ChannelClosed, connect
from gcproto.messages import IAm, WhoAreYou
from gcproto.records import replace
from gcproto.wire import FrameType, Header, Phase
from tests.fuzz import mutate
from tests.fuzz.control import JOB, MESSAGES
from tests.fuzz.registration import stream
from tests.fuzz.scrapes import VALID
from tests.fuzz.tickets import lay_key, ticket
from tests.integration.cluster import Cluster

#: the greeting of ZMTP 3.0 with the NULL mechanism, and a READY command of a PUSH socket
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY: Final = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
DOORS: Final = ("supervisor", "lane", "control port", "lane port", "admin", "metrics")
PATIENCE: Final = 10.0
_WORKER: Final[tuple[packed.Message, ...]] = (
    WhoAreYou(), messages.Register("x", 0, 1, 0, 1, 1, JOB, token=b"t" * 32),
    messages.Reattach(JOB, 0, 1, ticket(JOB, 0)),
    messages.DeclareDomain("ddp", 0, (0,), True), advice.AskAdvice(1),
)  # fmt: skip
_LANE: Final[tuple[packed.Message, ...]] = (
    lane_messages.Attach(JOB, 0, ticket(JOB, 0)), lane_messages.MapSection(0, 0, 0),
    lane_messages.Push(0, 1, (0,), True, 2),
)  # fmt: skip
_to_worker = packed.Decoder[Any](messages.ToWorker)


def _frame(rng: random.Random) -> tuple[bytes, bytes]:
    """A frame of a stranger, or of the past."""
    sender, life = wire.node_id("c"), mutate.number(rng) % 2**64 or 1
    kind = rng.choice((FrameType.HELLO, FrameType.DATA, FrameType.CONTROL, FrameType.HEARTBEAT))
    body = packed.encode(messages.Hello("c", "tcp://127.0.0.3:7470", 1, 1, 1, "fuzz"))
    if kind is not FrameType.HELLO:
        sender, life = wire.node_id(rng.choice("bc")), rng.randrange(1, 99)
        body = packed.encode(rng.choice(MESSAGES))
    header = Header(kind, sender=sender, incarnation=life, link_seq=int(kind in wire.SEQUENCED))
    if kind is FrameType.DATA:
        header = replace(header, phase=Phase.CONTRIBUTION, job=JOB, elements=64, codec=rng.randrange(50))
        body = rng.randbytes(256)
    raw, payload = mutate.sealed(header, mutate.packed(rng, body) if kind is not FrameType.DATA else body)
    return (mutate.spoil(rng, raw), payload) if rng.random() < 0.3 else (raw, payload)


class Daemon:
    """Two daemons on loopback, one of which is knocked at."""

    name = "daemon"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-"))
        port = free_ports(2)
        self._admin, self._metrics = port, port + 1
        self._cluster = Cluster(self._folder, 2, forked=False)
        daemon = self._cluster.daemons[0]
        daemon.options |= {"node.admin": f"127.0.0.1:{port}", "node.metrics": f"127.0.0.1:{port + 1}"}
        lay_key(daemon.state)
        self._cluster.__enter__()
        self._socket, self._port = str(daemon.socket), int(daemon.address.rpartition(":")[2])
        self._context: zmq.Context[Any] = zmq.Context()

    def close(self) -> None:
        """A real job, then the end. AssertionError if the job is not served."""
        try:
            outcomes = self._cluster.run("tests.integration.client_workers:sums", ranks=[0, 1])
            assert [outcome.ok()["wrong"] for outcome in outcomes] == [[], []]
            assert all(
                d.lives == 1 and d.process is not None and d.process.poll() is None for d in self._cluster.daemons
            )
            assert "defect" not in self._cluster.daemons[0].text(), self._cluster.daemons[0].text()[-4000:]
            assert "Traceback" not in self._cluster.daemons[0].text(), self._cluster.daemons[0].text()[-4000:]
        finally:
            self._context.destroy(0)
            self._cluster.__exit__(None, None, None)
            shutil.rmtree(self._folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------- inputs
    def draw(self, rng: random.Random) -> bytes:
        door = rng.randrange(len(DOORS))
        name = DOORS[door]
        if name in ("supervisor", "lane"):
            parts = [stream(rng, _WORKER if name == "supervisor" else _LANE)]
        elif name == "metrics":
            parts = [mutate.spoil(rng, rng.choice(VALID), rng.choice(VALID))]
        elif name == "admin":
            parts = [mutate.spoil(rng, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + rng.randbytes(40))]
        elif rng.random() < 0.6:
            # As messages of ZeroMQ: the first part may be followed by any number of others.
            parts = [b"", *_frame(rng), *(rng.randbytes(9) for _ in range(rng.choice((0, 0, 0, 1, 50))))]
        else:
            raw, payload = _frame(rng)
            first, last = (bytes([len(part) % 256]) + part for part in (raw, payload))
            sent = GREETING + READY + b"\x01" + first + b"\x00" + last
            parts = [mutate.spoil(rng, sent) if rng.random() < 0.8 else GREETING + READY + b"\x02" + b"\xff" * 8]
        return msgspec.msgpack.encode((door, parts))

    # ---------------------------------------------------------------------------------------- feeding
    def feed(self, data: bytes) -> str:
        door, parts = msgspec.msgpack.decode(data, type=tuple[int, list[bytes]])
        name = DOORS[door]
        if len(parts) > 1:
            self._post(self._address(name)[1], parts[1:])
        else:
            self._knock(name, parts[0])
        self._asked()
        return name

    def _address(self, name: str) -> tuple[str, int]:
        ports = {
            "lane port": self._port,
            "control port": self._port + 1,
            "admin": self._admin,
            "metrics": self._metrics,
        }
        return "127.0.0.1", ports[name]

    def _post(self, port: int, parts: list[bytes]) -> None:
        sender = self._context.socket(zmq.PUSH)
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send_multipart(parts)
        sender.close(1000)

    def _knock(self, name: str, data: bytes) -> None:
        """Send, read whatever comes for a moment, go away."""
        local = name in ("supervisor", "lane")
        sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        sock.settimeout(0.02)
        with sock, contextlib.suppress(OSError):
            sock.connect((self._socket + (".lane0" if name == "lane" else "")) if local else self._address(name))
            sock.sendall(data)
            sock.recv(1 << 16)

    def _asked(self) -> None:
        """Ask the daemon who it is, as the next worker would."""
        channel = connect(self._socket, _to_worker)
        try:
            channel.send(WhoAreYou())
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                with contextlib.suppress(ChannelClosed):
                    if any(isinstance(m, IAm) for m, _ in channel.receive()):
                        return
                time.sleep(0.001)
        finally:
            channel.close()
        raise AssertionError(f"the daemon does not answer any more: {self._cluster.daemons[0].text()[-4000:]}")
