"""A TCP relay that flips bytes of what passes through it when it is told to; a process of its own.

What may live here: relaying, flipping, and how the soak starts such a process and speaks to it. What may not: what the
bytes mean.

    python -m tests.soak.proxy --route 127.0.0.1:8470=10.77.0.2:7470 --route ...

It says ``ready`` once all routes listen. A line ``flip COUNT SECONDS SEED`` on its standard input makes it change COUNT
bytes, at instants drawn within the next SECONDS, each in the next piece that some connection sends forwards (from who
connected to whom it connected to); for each byte it prints ``{"flipped": route, "at": offset in that connection}``. It
ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field

from benchmarks.lab import netns, processes

PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class Route:
    """Whoever connects to ``listen`` (host, port) is connected to ``to``."""

    listen: tuple[str, int]
    to: tuple[str, int]

    def __str__(self) -> str:
        return "{}:{}={}:{}".format(*self.listen, *self.to)


def read_route(text: str) -> Route:
    """``HOST:PORT=HOST:PORT``; ValueError saying what is accepted."""
    ends = [end.rpartition(":") for end in text.split("=")]
    if len(ends) != 2 or not all(host and port.isdigit() for host, _, port in ends):
        raise ValueError(f"route {text!r}: expected HOST:PORT=HOST:PORT")
    (host, _, port), (to_host, _, to_port) = ends
    return Route((host, int(port)), (to_host, int(to_port)))


@dataclass(slots=True)
class Damage:
    """Bytes to flip in what comes next: for each the mask and where in the piece, from 0 to 1."""

    due: deque[tuple[int, float]] = field(default_factory=deque)

    def add(self, chance: random.Random) -> None:
        """One more byte, any of its bits."""
        self.due.append((1 << chance.randrange(8), chance.random()))

    def apply(self, piece: bytes) -> tuple[bytes, int | None]:
        """(the piece as it goes on, where it was changed or None): one byte of it at most."""
        if not self.due or not piece:
            return piece, None
        mask, place = self.due.popleft()
        at = int(place * len(piece))
        changed = bytearray(piece)
        changed[at] ^= mask
        return bytes(changed), at


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: Route, damage: Damage | None
) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            if damage is not None:
                piece, at = damage.apply(piece)
                if at is not None:
                    print(json.dumps({"flipped": str(route), "at": passed + at}), flush=True)
            passed += len(piece)
            writer.write(piece)
            await writer.drain()
    # Both ends see it: a half-closed connection would look like a peer that has nothing to say.
    writer.transport.abort()


async def serve(routes: list[Route], damage: Damage) -> list[asyncio.Server]:
    """Listens on all routes. Raises OSError where that cannot be."""
    serving: set[asyncio.Task[None]] = set()

    def serve_route(route: Route) -> object:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                out_reader, out_writer = await asyncio.open_connection(*route.to)
            except OSError:
                writer.transport.abort()
                return
            for task in (
                asyncio.ensure_future(_relay(reader, out_writer, route, damage)),
                asyncio.ensure_future(_relay(out_reader, writer, route, None)),
            ):
                serving.add(task)
                task.add_done_callback(serving.discard)

        return connected

    return [await asyncio.start_server(serve_route(r), *r.listen, limit=PIECE) for r in routes]  # type: ignore[arg-type]


async def obey(lines: asyncio.StreamReader, damage: Damage) -> None:
    """Flips as it is told until the lines end."""
    loop = asyncio.get_running_loop()
    while line := (await lines.readline()).split():
        count, seconds, seed = int(line[1]), float(line[2]), int(line[3])
        chance = random.Random(seed)
        for _ in range(count):
            loop.call_later(chance.uniform(0.0, seconds), damage.add, chance)


async def _main(routes: list[Route]) -> None:
    damage = Damage()
    servers = await serve(routes, damage)
    print("ready", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await obey(lines, damage)
    for server in servers:
        server.close()


class Proxy(processes.Owner):
    """The process on ``host`` as the soak has it: a context manager. ``flipped`` counts the bytes it has changed."""

    def __init__(self, host: netns.Host, routes: list[Route]) -> None:
        self.host, self.routes, self.flipped = host, routes, 0
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def flip(self, count: int, seconds: float, seed: int) -> None:
        """See the module's text. Raises BrokenPipeError if the process is gone."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(f"flip {count} {seconds} {seed}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        if self.process is not None:
            processes.end([self.process], grace=1.0)
            if self.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.process.stdin.close()
            if self._reader is not None:
                self._reader.join(2.0)

    def _open(self) -> None:
        argv = [sys.executable, "-m", "tests.soak.proxy"]
        argv += [word for route in self.routes for word in ("--route", str(route))]
        self.process = self.host.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise netns.LabError(f"the proxy on {self.host.address} did not start: {', '.join(map(str, self.routes))}")
        self._reader = threading.Thread(target=self._count, daemon=True)
        self._reader.start()

    def _count(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for _ in self.process.stdout:
            self.flipped += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", type=read_route, action="append", required=True, metavar="HOST:PORT=HOST:PORT")
    asyncio.run(_main(parser.parse_args().route))
    return 0


if __name__ == "__main__":
    sys.exit(main())
