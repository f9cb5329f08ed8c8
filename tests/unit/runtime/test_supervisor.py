"""The daemon's clock.

What may live here: tests of `gcserver/runtime/supervisor.py` that need no daemon. What may not: its parts, and daemons
(`tests/integration`).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.runtime.supervisor import TICK, Supervisor


def test_a_defect_in_what_the_clock_drives_does_not_stop_it() -> None:
    later: list[tuple[float, Any]] = []
    daemon: Any = Supervisor.__new__(Supervisor)
    daemon.stopped = asyncio.Event()
    daemon.loop = SimpleNamespace(call_later=lambda *args: later.append(args))
    daemon.registrations = SimpleNamespace(tick=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        daemon._tick()
    assert later == [(TICK, daemon._tick)]
    daemon.stopped.set()
    daemon._tick()
    assert len(later) == 1
