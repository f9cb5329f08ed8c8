"""Target: what workers say to a supervisor, as bytes on its socket.

An input is who of two nodes is first, and a list of (before which genuine message of node a's worker, on which
connection, bytes). Connection 0 is the worker's own, others are strangers'. Whoever cannot be read is told why and
closed; the daemon and the next job go on.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import msgspec

from gcproto import advice, messages, packed, states
from gcproto.agreed import Resumed
from tests.fuzz import mutate
from tests.fuzz.control import JOB, SupervisorTarget, genuine, said, serves
from tests.fuzz.supervisors import Pair, Worker
from tests.fuzz.tickets import ticket
from tests.fuzz.wires import LENGTH, framed

_OTHERS: Final[tuple[packed.Message, ...]] = (
    messages.Reattach(JOB, 0, 1, ticket(JOB, 0)), messages.Reattach(JOB, 1, 1, ticket(JOB, 1)),
    messages.Reattach(JOB, 1, 1, ticket(JOB, 0)), messages.Unregister(), messages.WhoAreYou(),
    messages.DeclareDomain("tp", 1, (0,), False, "none"),
    messages.DeclareDomain("w", 2, (0, 1), True, "powersgd", True),
    advice.AskAdvice(3, 0, ()), states.AskStanding(0), states.AskStanding(7),
    messages.DeclareDomain("r", 3, (0, 1), True, resumed=Resumed(b"o" * 16, 7, (1, 2), (messages.Rule("*", "topk"),))),
)  # fmt: skip


def stream(rng: random.Random, some: tuple[Any, ...]) -> bytes:
    """A few messages gone wrong, each or their bytes as a whole."""
    out = b""
    for _ in range(rng.choice((1, 1, 2, 5))):
        body = packed.encode(rng.choice(some))
        out += framed(mutate.packed(rng, body) if rng.random() < 0.8 else body)
    kind = rng.randrange(12)
    if kind == 0:
        return mutate.spoil(rng, out)
    if kind == 1:
        return rng.randbytes(rng.randrange(200))
    if kind == 2:
        return LENGTH.pack(mutate.number(rng) % 2**32) + out
    return out


class Registration(SupervisorTarget):
    """Two supervisors with a worker each, one of which is fed."""

    name = "registration"

    def draw(self, rng: random.Random) -> bytes:
        first = rng.randrange(2)
        real = genuine(first)[1]
        some = [
            (rng.randrange(len(real)), rng.randrange(3), stream(rng, (*real, *_OTHERS)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        return msgspec.msgpack.encode((first, some))

    def feed(self, data: bytes) -> str:
        first, some = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[int, int, bytes]]])
        return asyncio.run(_play(first, some))


async def _play(first: int, some: list[tuple[int, int, bytes]]) -> str:
    pair, strangers = Pair(first), dict[int, Worker]()

    def before(number: int) -> None:
        for _, connection, data in [s for s in some if s[0] == number]:
            if connection:
                strangers[connection] = strangers.get(connection) or Worker(pair.a)
            (strangers[connection] if connection else pair.workers[0]).give(data)

    try:
        pair.before_said = before
        missed = await pair.play("train", JOB)
        pair.before_said = lambda number: None
        await pair.tick()
        outcome = said(pair, missed)
        for worker in strangers.values():
            worker.leave()
        await pair.end()
        await serves(pair)
        assert len(pair.a.registrations.channels) == 1, "connections are held on to"
        return outcome
    finally:
        pair.close()
