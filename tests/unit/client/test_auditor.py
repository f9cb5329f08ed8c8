"""Audits of one rank's steps against a fake daemon, which delivers what the test wants: with DDP, with the wrapper."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import auditor as auditor_module
from gcclient.api import current
from gcproto.audits import AuditAnswer, AuditReport
from gcproto.lane_messages import Push
from gcproto.messages import DeclareDomain
from tests.unit.client.fake import FakeDaemon, FakeDomain


class _Net(nn.Module):
    """fp32, fp64, an empty parameter and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 7).double()
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double()) + self.empty.sum()


def _trained(audit: gcclient.Audit | None, steps: int) -> list[tuple[int, int]]:
    """(step of the newest audit or 0, how many there were) after each step."""
    model = DistributedDataParallel(_Net(), find_unused_parameters=True, bucket_cap_mb=0.01)
    model.register_comm_hook(gcclient.state(model, audit=audit), gcclient.ddp_hook)
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(3, 20)).sum().backward()
        report = gcclient.stats()["audit"]
        seen.append((report["step"], report["audits"]) if report else (0, 0))
    return seen


def _reports(daemon: FakeDaemon, count: int) -> list[AuditReport]:
    daemon.wait(lambda: sum(isinstance(m, AuditReport) for m in daemon.heard[-1]) >= count)
    return [m for m in daemon.heard[-1] if isinstance(m, AuditReport)]


def _halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is delivered of domains that are not audits' is half of what was pushed."""
    original = FakeDomain.copy

    def copy(self: FakeDomain, key: int, step: int) -> None:
        original(self, key, step)
        block = self.blocks[key]
        if len(self.space.sections[0].tensors) > 1:
            slot = self.plans[block.lane].slots[key]
            view = memoryview(self.maps[block.lane][slot.chunk])[slot.output : slot.output + block.nbytes]
            np.frombuffer(view, np.float32 if block.dtype.itemsize == 4 else np.float64)[:] *= 0.5

    monkeypatch.setattr(FakeDomain, "copy", copy)


def test_a_step_is_audited_when_the_next_begins(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor_module, "PIECE_BYTES", 4096)  # several pieces, the last one shorter
    assert _trained(gcclient.Audit(every=2), 6) == [(0, 0), (0, 0), (2, 1), (2, 1), (4, 2), (4, 2)]
    report = gcclient.stats()["audit"]
    assert (report["error"], report["cosine"], report["ratio"]) == (0.0, pytest.approx(1.0), 1.0)
    ddp, audit = [m for m in alone.heard[-1] if isinstance(m, DeclareDomain)][:2]
    assert (ddp.label, ddp.audit) == ("ddp.0", 2)
    assert (audit.label, audit.codec, audit.ranks, audit.audit) == ("audit of ddp.0", "none", (0,), 0)
    assert [(r.domain, r.step, r.error, r.audits, r.dense) for r in _reports(alone, 2)] == [
        (ddp.domain, 2, 0.0, 1, False), (ddp.domain, 4, 0.0, 2, False),
    ]  # fmt: skip


def test_without_an_audit_nothing_more_is_said(alone: FakeDaemon) -> None:
    assert _trained(None, 3) == [(0, 0)] * 3
    (domain,) = [m for m in alone.heard[-1] if isinstance(m, DeclareDomain)]
    assert (domain.label, domain.audit) == ("ddp.0", 0)


def test_the_variable_asks_for_one_too(alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_AUDIT", "every=1")
    assert _trained(None, 3) == [(0, 0), (1, 1), (2, 2)]


def test_what_is_missing_is_found(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _halves(monkeypatch)
    caplog.set_level(logging.INFO)
    _trained(gcclient.Audit(every=1, limit=0.4), 2)
    report = gcclient.stats()["audit"]
    assert (report["error"], report["cosine"], report["ratio"]) == pytest.approx((0.5, 1.0, 0.5))
    used = {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert {t["name"] for t in report["worst"] if t["error"] == pytest.approx(0.5)} == used
    assert {t["name"] for t in report["worst"] if t["error"] == 0} == {"empty", "unused.weight", "unused.bias"}
    (record,) = [r for r in caplog.records if "audit of ddp.0" in r.message]
    assert record.levelname == "WARNING" and "step 1: error 0.5" in record.message
    assert record.message.endswith("above the limit of 0.4")
    assert not _reports(alone, 1)[0].dense


@pytest.mark.parametrize(("window", "lost_in", "skipped"), [(1, 3, {3}), (2, 3, {4}), (2, 4, {4}), (2, 9, set())])
def test_averages_over_other_members_are_not_compared(
    alone: FakeDaemon, caplog: pytest.LogCaptureFixture, window: int, lost_in: int, skipped: set[int]
) -> None:
    """A node is lost between step ``lost_in`` and its audit; from the next step on all are made without it."""
    caplog.set_level(logging.INFO)
    pushed: list[Push] = []

    def epoch(message: Push) -> int:
        (model, *_) = (m for m in alone.heard[-1] if isinstance(m, DeclareDomain))
        pushed.extend([message] * (message.domain == model.domain))
        step = pushed[-1].step if pushed else 0
        return 2 if step > lost_in or (message.domain != model.domain and step == lost_in) else 1

    alone.epoch = epoch
    found = _trained(gcclient.Audit(every=window, window=window), 7)
    assert gcclient.stats()["audit"]["skipped"] == len(skipped)
    lines = [r.message for r in caplog.records if "nodes were lost or came back meanwhile" in r.message]
    assert [int(line.split("step ")[1].split(":")[0]) for line in lines] == sorted(skipped)
    assert found[-1][1] == 6 // window - len(skipped)


def test_a_step_within_the_limit_is_no_warning(alone: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _trained(gcclient.Audit(every=1, limit=0.4), 2)
    (record,) = [r for r in caplog.records if "audit of ddp.0" in r.message]
    assert record.levelname == "INFO"


def test_the_daemon_is_asked_until_it_answers(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _halves(monkeypatch)
    audit = gcclient.Audit(every=1, limit=0.4, action="dense")
    model = DistributedDataParallel(_Net(), find_unused_parameters=True)
    state = gcclient.state(model, audit=audit)
    model.register_comm_hook(state, gcclient.ddp_hook)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.ones(3, 20)).sum().backward()

    steps(3)
    assert [r.dense for r in _reports(alone, 2)] == [True, True]
    alone.say(-1, AuditAnswer(state.domain.id, error="no"))
    current().daemon.wait(lambda: "cannot go on uncompressed: no" in caplog.text, 5)
    steps(1)
    assert _reports(alone, 3)[-1].dense
    alone.say(-1, AuditAnswer(state.domain.id, 2, 9))
    current().daemon.wait(lambda: gcclient.stats()["audit"]["dense_from"] == 9, 5)
    assert "uncompressed from step 9 on (plan 2)" in caplog.text
    steps(1)
    assert not _reports(alone, 4)[-1].dense and gcclient.stats()["audit"]["dense_from"] == 9


@pytest.mark.parametrize("answered", [True, False])
def test_a_rank_that_becomes_the_lowest_does_not_ask_for_what_was_done(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """The lowest rank asked; steps were exact then (``answered``), and somebody set another plan since."""
    lowest = [False]
    monkeypatch.setattr(auditor_module.Auditor, "_first", property(lambda _: lowest[0]))
    model = DistributedDataParallel(_Net(), find_unused_parameters=True)
    audit = gcclient.Audit(every=1, limit=0.4, action="dense")
    model.register_comm_hook(gcclient.state(model, audit=audit), gcclient.ddp_hook)

    def steps(count: int, halved: bool) -> None:
        with monkeypatch.context() as patch:
            if halved:
                _halves(patch)
            for _ in range(count):
                model(torch.ones(3, 20)).sum().backward()

    steps(2, True)
    if answered:
        steps(2, False)
    lowest[0] = True
    steps(3, True)
    assert any(r.dense for r in _reports(alone, 4)) is not answered


# ------------------------------------------------------------------------------- the optimizer wrapper
def _wrapped(audit: gcclient.Audit | None) -> tuple[_Net, torch.optim.Optimizer]:
    model = _Net()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    return model, gcclient.DistributedOptimizer(plain, model.named_parameters(), groups="layer-wise", audit=audit)


def test_the_wrappers_step_is_audited_at_its_end(joined: FakeDaemon) -> None:
    model, optimizer = _wrapped(gcclient.Audit(every=2))
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 20)).sum().backward()
        optimizer.step()
        report = gcclient.stats()["audit"]
        seen.append((report["step"], report["audits"]) if report else (0, 0))
    assert seen == [(0, 0), (2, 1), (2, 1), (4, 2), (4, 2)]
    assert (report["error"], report["ratio"], report["domain"]) == (0.0, 1.0, "optimizer.0")
    names = {t["name"] for t in report["worst"]}
    assert names == {name for name, _ in model.named_parameters()}, "and not the note of who has gradients"
    model_domain, audit = [m for m in joined.heard[-1] if isinstance(m, DeclareDomain)]
    assert (model_domain.audit, audit.label) == (2, "audit of optimizer.0")


def test_the_variable_is_for_the_wrapper_too(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_AUDIT", "every=1")
    model, optimizer = _wrapped(None)
    model(torch.ones(3, 20)).sum().backward()
    optimizer.synchronize()
    assert gcclient.stats()["audit"]["step"] == 1
    optimizer.step()
    assert gcclient.stats()["audit"]["audits"] == 1, "what was averaged already is not exchanged again"


def test_a_group_without_gradients_counts_as_zeros(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    _halves(monkeypatch)
    model, optimizer = _wrapped(gcclient.Audit(every=1))
    model(torch.ones(3, 20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.first(torch.ones(3, 20)).sum().backward()  # what the other layer's blocks hold is step 1's
    optimizer.step()
    report = gcclient.stats()["audit"]
    assert (report["step"], report["error"]) == (2, pytest.approx(0.5))
    off = {t["name"]: t["error"] for t in report["worst"]}
    assert off["first.weight"] == pytest.approx(0.5) and off["second.weight"] == off["second.bias"] == 0


def test_sums_are_compared_with_sums(joined: FakeDaemon) -> None:
    weight = nn.Parameter(torch.ones(300))
    plain = torch.optim.SGD([weight], 0.1)
    optimizer = gcclient.DistributedOptimizer(plain, op=gcclient.Sum, audit=gcclient.Audit(every=1))
    weight.pow(2).sum().backward()
    optimizer.step()
    report = gcclient.stats()["audit"]
    assert (report["step"], report["error"]) == (1, 0.0)
    labels = {m.domain: m.label for m in joined.heard[-1] if isinstance(m, DeclareDomain)}
    assert {(labels[p.domain], p.flags) for lane in (0, 1) for p in joined.pushes(lane)} == {
        ("optimizer.0", 0),
        ("audit of optimizer.0", 0),
    }
