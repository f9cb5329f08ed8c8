"""Server-sent events: who gets what, who is cut off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gcserver.admin.streams import Streams, encoded


class Writer:
    """As much of a connection as a stream writes to; ``unread`` bytes of it have not been read."""

    def __init__(self) -> None:
        self.data, self.unread, self.cut = b"", 0, False
        self.transport = SimpleNamespace(
            get_write_buffer_size=lambda: self.unread, abort=self._abort, is_closing=lambda: self.cut
        )

    def _abort(self) -> None:
        self.cut = True

    def write(self, data: bytes) -> None:
        self.data += data

    def events(self) -> list[bytes]:
        return self.data.split(b"\r\n\r\n", 1)[1].split(b"\n\n")[1:-1]


class Open:
    """Streams, a clock that stands still, and clients that listen."""

    def __init__(self, most: int = 4) -> None:
        self.now = 0.0
        self.firsts = 0
        self.streams = Streams(self._first, most, patience=10.0, clock=lambda: self.now)
        self.readers: list[asyncio.StreamReader] = []
        self.tasks: list[asyncio.Task[None]] = []

    def _first(self) -> None:
        self.firsts += 1

    async def client(self, seconds: float = 60.0) -> Writer:
        writer, reader = Writer(), asyncio.StreamReader()
        self.readers.append(reader)
        serving: Any = self.streams.serve(reader, writer, seconds)  # type: ignore[arg-type]
        self.tasks.append(asyncio.ensure_future(serving))
        await asyncio.sleep(0)
        return writer

    async def close(self) -> None:
        for reader in self.readers:
            reader.feed_eof()
        await asyncio.gather(*self.tasks)
        assert not len(self.streams)


def test_everybody_gets_everything_and_newcomers_the_newest_of_each_topic() -> None:
    async def test() -> None:
        o = Open()
        early = await o.client()
        assert early.data.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        for topic, message in (("x", b"x1\n\n"), ("y", b"y1\n\n"), ("x", b"x2\n\n"), ("z", b"z1\n\n")):
            o.streams.publish(topic, message)
        o.streams.forget("z")
        late = await o.client()
        assert (early.events(), late.events()) == ([b"x1", b"y1", b"x2", b"z1"], [b"x2", b"y1"])
        assert o.firsts == 1
        await o.close()
        await o.client()
        assert o.firsts == 2, "again, after nobody listened"
        await o.close()

    asyncio.run(test())


def test_who_does_not_read_gets_no_more_then_the_newest_then_is_cut_off() -> None:
    async def test() -> None:
        o = Open()
        slow, other = await o.client(), await o.client()
        slow.unread = 100
        for i in range(5):
            o.now += 1.0
            o.streams.publish("x", f"x{i}\n\n".encode())
            o.streams.publish("y", f"y{i}\n\n".encode())
        assert slow.events() == [] and len(other.events()) == 10
        slow.unread = 0
        o.streams.publish("z", b"z\n\n")
        assert slow.events() == [b"x4", b"y4", b"z"]
        slow.unread = 1
        o.streams.publish("x", b"x5\n\n")
        o.now += 10.0
        o.streams.publish("x", b"x6\n\n")
        assert not slow.cut, "it has ten seconds"
        o.now += 0.1
        o.streams.publish("x", b"x7\n\n")
        o.streams.publish("x", b"x8\n\n")
        assert slow.cut and other.events()[-1] == b"x8"
        await o.close()

    asyncio.run(test())


def test_they_are_bounded_and_a_place_is_free_again_when_one_leaves() -> None:
    async def test() -> None:
        o = Open(most=2)
        await o.client()
        assert not o.streams.full
        await o.client()
        assert o.streams.full
        o.readers[0].feed_data(b"GET /metrics HTTP/1.1\r\n\r\n")  # no second request on a stream: it ends
        await o.tasks[0]
        assert not o.streams.full and len(o.streams) == 1
        await o.close()

    asyncio.run(test())


def test_a_stream_ends_in_time_and_what_was_not_read_does_not_keep_it() -> None:
    async def test() -> None:
        o = Open()
        stuck, fine = await o.client(seconds=0.01), await o.client(seconds=0.01)
        stuck.unread = 100
        await asyncio.gather(*o.tasks)
        assert stuck.cut and not fine.cut and not len(o.streams)

    asyncio.run(test())


def test_an_event() -> None:
    assert encoded("overview", b"{}") == b"event: overview\ndata: {}\n\n"
