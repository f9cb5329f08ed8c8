"""gcclient.advise: which model is meant, the way of the question, the answer and its table."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from gcclient.api import current
from gcproto.advice import AdviceRow, Advised, AskAdvice
from gcproto.messages import Reattach
from tests.unit.client.fake import FakeDaemon

ROWS = (AdviceRow(12.5e6, True, "none", "none", 2.0), AdviceRow(125e6, False, "fast", "sidco-e(ratio=0.01)", 0.05))


def _model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 2))


def _answering(daemon: FakeDaemon, **answer: Any) -> None:
    daemon.answer = lambda m: Advised(m.request, **answer) if isinstance(m, AskAdvice) else None


def _asked(daemon: FakeDaemon) -> list[AskAdvice]:
    return [m for m in daemon.heard[-1] if isinstance(m, AskAdvice)]


def test_the_answer_and_its_table(joined: FakeDaemon) -> None:
    _answering(joined, verdict="at 100 Mbit/s use it", compute=0.04, stops_paying=5e8, rows=ROWS)
    found = gcclient.advise(bandwidths=["1gbit", 2.5e6])
    assert _asked(joined) == [AskAdvice(1, -1, (125e6, 2.5e6))]
    assert (found.verdict, found.compute_seconds, found.pays_below) == ("at 100 Mbit/s use it", 0.04, 5e8)
    assert found.rows[0] == gcclient.AdviceRow(12.5e6, True, "none", "none", 2.0)
    assert str(found).splitlines() == [
        "at 100 Mbit/s use it",
        "computing: 40.0 ms a step; compression pays below about 4 Gbit/s",
        "link                   plan  codec                      step",
        "100 Mbit/s (measured)  none  none                  2000.0 ms",
        "1 Gbit/s               fast  sidco-e(ratio=0.01)     50.0 ms",
    ]


@pytest.mark.parametrize(("stops", "below", "text"), [(None, math.inf, "on every link"), (0.0, 0.0, "on no link")])
def test_where_compression_always_or_never_pays(
    joined: FakeDaemon, stops: float | None, below: float, text: str
) -> None:
    _answering(joined, stops_paying=stops)
    found = gcclient.advise()
    assert found.pays_below == below and text in str(found)


def test_too_little_measured_is_an_error_that_ends_nothing(joined: FakeDaemon) -> None:
    _answering(joined, error="too little has been measured yet", advice="ask again")
    with pytest.raises(gcclient.NoAdvice, match=r"too little has been measured yet.*What to do: ask again"):
        gcclient.advise()
    assert gcclient.push_pull(torch.ones(2)).tolist() == [1.0, 1.0]
    _answering(joined, verdict="now")
    assert gcclient.advise().verdict == "now"


def test_a_model_a_state_and_an_optimizer_stand_for_their_domain(joined: FakeDaemon) -> None:
    _answering(joined)
    model, other = _model(), _model(5)
    state = gcclient.state(model)
    optimizer = gcclient.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other.named_parameters())
    for given in (model, state, other, optimizer, None):
        gcclient.advise(given)
    first, second = (d.id for d in current().domains.values())
    assert [m.domain for m in _asked(joined)] == [first, first, second, second, -1]


def test_a_model_whose_own_module_is_called_module_is_found_where_the_wrapper_declared_it(joined: FakeDaemon) -> None:
    _answering(joined)
    outer = torch.nn.Module()
    outer.module = _model()
    gcclient.DistributedOptimizer(torch.optim.SGD(outer.parameters(), 0.1), outer.named_parameters())
    gcclient.advise(outer)
    (domain,) = current().domains.values()
    assert [m.domain for m in _asked(joined)] == [domain.id]


def test_what_was_not_declared_or_is_no_model_is_refused(joined: FakeDaemon) -> None:
    with pytest.raises(ValueError, match="was not declared"):
        gcclient.advise(_model())
    with pytest.raises(TypeError, match="expected a model, a state or a DistributedOptimizer, got a int"):
        gcclient.advise(3)
    assert not _asked(joined)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [([0], ValueError), ([-1.0], ValueError), ([1e-302], ValueError), ([10**400], ValueError),
     ([math.inf], ValueError), (["quick"], ValueError), ([None], ValueError),
     ([1.0] * 65, ValueError), ("1gbit", TypeError), (5, TypeError)],
)  # fmt: skip
def test_bandwidths_that_are_none_are_refused_by_name(joined: FakeDaemon, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="bandwidths"):
        gcclient.advise(bandwidths=wrong)
    assert not _asked(joined)


def test_a_question_outlives_the_daemon(joined: FakeDaemon) -> None:
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(gcclient.advise()))
    worker.start()
    joined.wait(lambda: bool(_asked(joined)))
    joined.crash(2)
    _answering(joined, verdict="after all")
    joined.listen(2)
    worker.join(10)
    assert [f.verdict for f in found] == ["after all"]
    heard = [type(m) for m in joined.heard[-1]]
    assert heard.index(Reattach) < heard.index(AskAdvice)
    joined.say(-1, Advised(1, "once more"))
    _answering(joined, verdict="another")
    assert gcclient.advise().verdict == "another"


def test_the_jobs_failure_ends_the_wait(joined: FakeDaemon) -> None:
    failure = gcclient.PeerLost("b is gone")
    joined.answer = lambda m: current().fail(failure) if isinstance(m, AskAdvice) else None
    with pytest.raises(gcclient.PeerLost, match="b is gone"):
        gcclient.advise()


def test_advice_needs_a_session() -> None:
    with pytest.raises(gcclient.NotInitialized):
        gcclient.advise()
