"""How a lane process ends.

What may live here: tests of `gcserver/runtime/lane.py` that need no running lane. What may not: real ones
(`tests/integration`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.runtime.lane import serve
from gcserver.runtime.lanelink import DEFECT, LaneTrouble


def test_what_it_dies_of_is_said_to_the_supervisor() -> None:
    said: list[LaneTrouble] = []
    process: Any = SimpleNamespace(run=lambda: 1 // 0, send_up=said.append)
    with pytest.raises(ZeroDivisionError):
        serve(process)
    (message,) = said
    assert (message.job, message.kind) == (b"", DEFECT)
    assert message.message.startswith("this lane ends by a defect\nTraceback")
    assert "ZeroDivisionError" in message.message
