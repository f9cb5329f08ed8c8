"""What the metrics are fed.

What may live here: tests of `gcserver/runtime/observe.py`. What may not: names of series (`tests/unit/admin`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.messages import DeclareDomain
from gcserver.core.control_events import LogSettled
from gcserver.runtime.lanelink import StepTimes
from gcserver.runtime.observe import Observer
from gcserver.values import Address
from tests.unit.core.control_machine import domain_of, formed, said

NODE = SimpleNamespace(advertise=Address("a.cluster", 7470), metrics=None)


def test_a_models_steps_are_counted_and_not_what_is_exchanged_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    m = formed()
    job, model = domain_of(m)
    said(m, 1, DeclareDomain("audit of ddp", 7, (0,), codec="none"))
    supervisor: Any = SimpleNamespace(machine=m, node="a", config=SimpleNamespace(node=NODE))
    observer = Observer(supervisor, Any)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(observer._metrics, "observe_step", lambda *observed: seen.append(observed))
    for domain in (model, 7):
        observer.on_times(StepTimes((job, domain), ((1, 0.5),)))
        for step, void in ((1, False), (2, True)):
            observer.on_settled(LogSettled((job, domain), step, void, 0, 2))
    assert seen == [("train", "settled", 0.5), ("train", "void", None)]
    assert not observer._times
