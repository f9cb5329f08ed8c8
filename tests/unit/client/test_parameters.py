"""What a model's parameters are declared as: where blocks may not be cut, what is left out of compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gcclient
from gcclient import parameters
from gcclient.api import current
from gcclient.parameters import Model, Options, declare
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import sections


def _declared_whole(daemon: FakeDaemon, mode: str, compression: str | None, whole: bool | None) -> bool:
    daemon.mode = mode
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    try:
        named = [("w", torch.zeros(30, 30)), ("b", torch.zeros(30))]
        domain, _ = declare(current(), Model("test", named, (0,), Options(compression or "", whole)))
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


def test_what_is_left_out_has_blocks_of_its_own(joined: FakeDaemon) -> None:
    named = [(n, torch.zeros(300)) for n in ("emb.weight", "a.weight", "a.bias", "norm")]
    options = Options("topk(ratio=0.1)", exclude=("*.bias", "norm"), warmup=7, quality="safe")
    domain, found = declare(current(), Model("test", named, (0,), options))
    declared = domain.declared
    assert (declared.exclude, declared.warmup, declared.quality) == (("*.bias", "norm"), 7, "safe")
    names = [[t.name for t in d.section.tensors] for d in sections(joined)]
    assert names == [["norm", "a.bias"], ["a.weight", "emb.weight"]]
    assert [p.name for p in found] == ["norm", "a.bias", "a.weight", "emb.weight"]
    places = [{piece.place for piece in p.pieces} for p in found]
    assert places[0] == places[1] != places[2] == places[3]


def test_a_group_goes_together_with_what_it_leaves_out(joined: FakeDaemon) -> None:
    named = [(n, torch.zeros(300)) for n in ("a.weight", "a.bias", "b.weight", "b.bias")]
    options = Options(groups=[["b.bias", "b.weight"], ["a.bias", "a.weight"]], exclude=("*.bias",))
    _, found = declare(current(), Model("test", named, (0,), options))
    units = {p.name: {piece.unit for piece in p.pieces} for p in found}
    assert units["a.weight"] == units["a.bias"] != units["b.weight"] == units["b.bias"]


def test_a_pattern_that_leaves_nothing_out_is_noticed(joined: FakeDaemon) -> None:
    with pytest.warns(UserWarning, match=r"exclude: '\*\.bais' matches the name of no parameter"):
        gcclient.state(torch.nn.Linear(2, 2), exclude=["*.bais", "bias"])


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("exclude", "*.bias", TypeError, "expected a list of globs"),
        ("exclude", [3], TypeError, "a pattern in exclude=3"),
        ("exclude", ["a", ""], ValueError, "has 1 to .* characters, got 0"),
        ("exclude", ["a"] * 2000, ValueError, "at most 1024 patterns, got 2000"),
        ("quality", "best", ValueError, "quality=best: expected one of safe, balanced, fast"),
        ("warmup_steps", -1, ValueError, r"warmup_steps=-1: expected 0\.\.1000000"),
        ("warmup_steps", 1.5, TypeError, "warmup_steps=1.5: expected a whole number"),
        ("backward_passes_per_step", 0, ValueError, "expected 1 or more"),
    ],
)
def test_wrong_options_are_named_before_anything_is_declared(
    joined: FakeDaemon, argument: str, value: Any, error: type[Exception], message: str
) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        gcclient.state(model, **{argument: value})
    with pytest.raises(error, match=message):
        gcclient.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **{argument: value})
    assert not joined.domains
