"""`gcctl logs`: what a daemon logged, once or as it comes, through restarts of the daemon and of the connection.

What may live here: asking for it, going on where a connection ended, how a record is printed. What may not: what a
failure means (`gcctl.py`), connections (`gcctl_calls.py`).
"""

from __future__ import annotations

import argparse
import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver.admin import convert, gcctl_calls, jsonform, tables
from gcserver.admin.access import Paths
from gcserver.admin.gcctl_streams import MOST_OF_LOG, bounded
from gcserver.values import human_duration

#: between two attempts to reach a daemon that went away, seconds
_PAUSE: Final = 0.5
#: Whoever follows finds out that the other machine is gone within some five minutes; gRPC allows no shorter time.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Say = Callable[[str], bool]
Note = Callable[[str], None]


@dataclass(slots=True)
class _Place:
    """How far a reader is: in which life of the daemon, after which record."""

    incarnation: int = 0
    sequence: int = 0


def run(address: str, use: Paths | None, options: argparse.Namespace, say: Say, note: Note) -> None:
    """Until all is said, ``say`` tells that nobody reads, or the daemon cannot be reached for ``options.timeout``.
    Raises grpc.RpcError, TlsRefused and TooMuch."""
    place = _Place()
    reached = False
    gone: float | None = None
    while True:
        try:
            with gcctl_calls.connect(address, use, *_KEEPALIVE) as channel:
                for answer in _answers(channel, options, place):
                    reached, gone = True, None
                    if not _show(answer, place, options.json, say, note):
                        return
            if not options.follow:
                return
        except grpc.RpcError as error:
            if not (options.follow and reached and error.code() is grpc.StatusCode.UNAVAILABLE):
                raise
            if gone is not None and time.monotonic() - gone > options.timeout:
                raise
            if gone is None:
                gone = time.monotonic()
                note(f"{address} went away; trying for {human_duration(options.timeout)} to reach it again")
        # Also after an orderly end: a daemon that stops ends its streams, and another may begin.
        time.sleep(_PAUSE)


def _answers(channel: Any, options: argparse.Namespace, place: _Place) -> Iterator[pb.GetLogsResponse]:
    request = pb.GetLogsRequest(
        since_seconds=options.since,
        level=pb.LogLevel.Value(f"LOG_LEVEL_{options.level.upper()}"),
        follow=options.follow,
        after_sequence=place.sequence,
        incarnation=place.incarnation,
    )
    stub = pb_grpc.AdminServiceStub(channel)
    if not options.follow:
        # All at once: while a pager waits for its reader, the daemon need not.
        yield from list(bounded(stub.GetLogs(request, timeout=options.timeout), MOST_OF_LOG, "a log"))
        return
    call = stub.GetLogs(request)
    with _deadline(call, options.timeout) as began:
        for answer in call:
            began()
            yield answer


@contextmanager
def _deadline(call: Any, seconds: float) -> Iterator[Callable[[], None]]:
    """A stream that never ends has no deadline; its first answer has. Call what this yields when it is there."""
    late = threading.Event()

    def end() -> None:
        late.set()
        call.cancel()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    except grpc.RpcError:
        if late.is_set():
            raise _Late() from None
        raise
    finally:
        timer.cancel()
        call.cancel()


class _Late(grpc.RpcError):
    """As gRPC's own error for a call with a deadline."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> None:
        return None


def _show(answer: pb.GetLogsResponse, place: _Place, as_json: bool, say: Say, note: Note) -> bool:
    """Whether anybody still reads."""
    if answer.lost:
        note(f"{answer.lost} records are missing here: the daemon had dropped them before they were read")
    if place.incarnation not in (0, answer.incarnation):
        note("the daemon was started again")
        place.sequence = 0
    place.incarnation = answer.incarnation
    for record in answer.records:
        place.sequence = record.sequence
        plain = convert.plain(record)
        if not say(jsonform.text(plain) if as_json else line(plain)):
            return False
    return True


def line(record: dict[str, Any]) -> str:
    """A record for a person, by the clock of this machine's time zone; what has several lines is indented."""
    who = record["node"] + (f" lane {record['lane']}" if record["lane"] is not None else "")
    first, *more = f"{record['message']}\n{record['trace']}".split("\n")
    head = f"{_at(record['time'])}  {record['level']:<8}  {tables.clean(who)}: {tables.clean(first)}"
    return "\n".join([head, *(f"    {tables.clean(text)}" for text in more if text)])


def _at(seconds: float) -> str:
    """Seconds since 1970, as a clock shows them; other clocks than ours may be beyond all calendars."""
    try:
        return dt.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"
