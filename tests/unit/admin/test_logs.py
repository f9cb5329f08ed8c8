"""The ring of log records: what is kept, what is found again, and how `logging` fills it.

What may live here: tests of `gcserver/admin/logs.py`. What may not: readers over gRPC (`test_logstreams.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from gcproto import admin_pb2 as pb
from gcserver.admin.logs import LEVELS, MOST_TEXT, LogHandler, LogRing, bounded


def filled(count: int, **bounds: int) -> LogRing:
    ring = LogRing(**bounds)
    for number in range(1, count + 1):
        ring.append(float(number), "info", "gcserver", f"message {number}")
    return ring


def numbers(ring: LogRing, *arguments: Any, **options: Any) -> list[int]:
    return [record.sequence for record in ring.after(*arguments, **options).records]


def test_the_newest_are_kept_and_the_rest_is_counted() -> None:
    ring = filled(10, most=4)
    batch = ring.after(0)
    assert ([r.sequence for r in batch.records], batch.lost, batch.position, batch.more) == (
        [7, 8, 9, 10],
        6,
        10,
        False,
    )
    assert ring.oldest == 7 and ring.after(6).lost == 0 and numbers(ring, 8) == [9, 10]
    assert ring.after(10).records == () and ring.after(10).position == 10
    assert LogRing().oldest == 1


def test_bytes_bound_it_as_well() -> None:
    ring = LogRing(most=1000, most_bytes=10_000)
    for _ in range(50):
        ring.append(0.0, "info", "gcserver", "é" * 400)
    kept = ring.after(0).records
    assert sum(record.size for record in kept) <= 10_000 < sum(record.size for record in kept) + kept[0].size
    ring.append(0.0, "info", "gcserver", "x" * 20_000, "y" * 20_000)
    assert ring.after(0).records == (), "one that is larger than all there may be is dropped too"
    ring.append(0.0, "info", "gcserver", "short")
    assert numbers(ring, 0) == [52]


def test_long_texts_lose_their_middle() -> None:
    text = "head " + "é" * MOST_TEXT + " tail"
    short = bounded(text)
    assert len(short.encode()) <= MOST_TEXT
    assert short.startswith("head é") and short.endswith("é tail") and f"{len(text.encode())} bytes in all" in short
    assert bounded("as it is") == "as it is" and bounded("\ud800") == "?"


def test_level_time_and_size_select() -> None:
    ring = LogRing()
    for number, level in enumerate((*LEVELS, *LEVELS), 1):
        ring.append(float(number), level, "gcserver", "x" * 100)
    assert numbers(ring, 0, level="error") == [4, 5, 9, 10]
    assert numbers(ring, 0, level="warning", since=6.0) == [8, 9, 10]
    batch = ring.after(0, level="error", most_bytes=400)
    assert ([r.sequence for r in batch.records], batch.position, batch.more) == ([4, 5], 5, True)
    assert numbers(ring, 0, most_bytes=1) == [1], "at least one, or nobody would get on"
    assert ring.after(5, level="critical", since=99.0).position == 10


def test_levels_are_those_of_the_contract() -> None:
    assert [name.removeprefix("LOG_LEVEL_").lower() for name in pb.LogLevel.DESCRIPTOR.values_by_name] == [
        "unspecified",
        *LEVELS,
    ]


@pytest.fixture
def log() -> logging.Logger:
    made = logging.Logger("gcserver.test")
    made.addHandler(LogHandler(LogRing()))
    return made


def records(log: logging.Logger) -> Any:
    (handler,) = log.handlers
    assert isinstance(handler, LogHandler)
    return handler._ring.after(0).records


def test_what_is_logged_is_there(log: logging.Logger) -> None:
    log.warning("lane %d died", 3)
    log.log(25, "between", extra={"lane": 2})
    log.log(5, "less than all")
    first, second, third = records(log)
    assert (first.level, first.logger, first.message, first.lane) == ("warning", "gcserver.test", "lane 3 died", None)
    assert (second.level, second.lane, third.level) == ("info", 2, "debug")
    assert first.time <= second.time


def test_a_traceback_stands_by_itself(log: logging.Logger) -> None:
    try:
        raise ValueError("of all things")
    except ValueError:
        log.exception("it failed")
    (record,) = records(log)
    assert (record.level, record.message) == ("error", "it failed")
    assert record.trace.startswith("Traceback") and record.trace.endswith("ValueError: of all things")


def test_threads_log_at_once_and_wake_who_listens() -> None:
    ring, heard = LogRing(most=100), []

    def wake() -> None:
        heard.append(1)

    ring.listen(wake)
    threads = [
        threading.Thread(target=lambda: [ring.append(0.0, "info", "t", "x") for _ in range(250)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 1000 and numbers(ring, 0) == list(range(901, 1001))
    ring.leave(wake)
    ring.append(0.0, "info", "t", "x")
    assert len(heard) == 1000
