"""What a model's parameters are declared as: where blocks may not be cut."""

from __future__ import annotations

import pytest
import torch

import gcclient
from gcclient import parameters
from gcclient.api import current
from gcclient.parameters import declare
from tests.unit.client.fake import FakeDaemon


def _declared_whole(daemon: FakeDaemon, mode: str, compression: str | None, whole: bool | None) -> bool:
    daemon.mode = mode
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    try:
        named = [("w", torch.zeros(30, 30)), ("b", torch.zeros(30))]
        domain, _ = declare(current(), "test", named, (0,), compression, whole, None, None)
        return domain.declared.whole
    finally:
        gcclient.shutdown()


@pytest.mark.parametrize(
    ("mode", "compression", "whole", "expected"),
    [
        ("static", None, None, False),
        ("static", "powersgd(rank=4)", None, True),
        ("auto", None, None, True),
        ("lgreco", "topk(ratio=0.01)", None, True),
        ("auto", None, False, False),
        ("static", None, True, True),
    ],
)
def test_automatic_plans_get_whole_matrices_unless_told_otherwise(
    daemon: FakeDaemon, mode: str, compression: str | None, whole: bool | None, expected: bool
) -> None:
    assert _declared_whole(daemon, mode, compression, whole) is expected


def test_a_large_tensor_is_cut_for_automatic_plans_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "LARGEST_WHOLE", 4 * 900)
    assert _declared_whole(daemon, "auto", None, None)
    monkeypatch.setattr(parameters, "LARGEST_WHOLE", 4 * 900 - 1)
    assert not _declared_whole(daemon, "auto", None, None)
    assert _declared_whole(daemon, "auto", "powersgd(rank=4)", None)
