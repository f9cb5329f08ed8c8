"""Values as JSON and tensors beside it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from gcclient import objects


def test_state_survives_json() -> None:
    tensor = torch.arange(3)
    state = {
        "state": {0: {"step": tensor, "more": [1, (2.5, None)]}, 7: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 7], "name": "x", "flag": True, "e": []}],
        "inf": math.inf,
    }
    found: list[torch.Tensor] = []
    packed = json.loads(json.dumps(objects.pack(state, found)))
    assert len(found) == 1 and found[0] is tensor
    (made,) = objects.empties(packed)
    assert made.shape == (3,) and made.dtype is torch.int64
    again = objects.unpack(packed, found)
    assert again == state and isinstance(again["param_groups"][0]["betas"], tuple)
    assert list(again["state"]) == [0, 7]


@pytest.mark.parametrize("value", [object(), {"a": {1.5: 2}}, {"a": {True: 2}}, [lambda: 0], b"bytes"])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="sent"):
        objects.pack(value, [])
    with pytest.raises(TypeError, match="sent"):
        objects.decode(objects.encode([torch.ones(3), value]))


@pytest.mark.parametrize(
    ("tensor", "why"),
    [(torch.eye(2).to_sparse(), "to_dense"), (torch.empty(2, device="meta"), "no values")],
)
def test_a_tensor_that_is_more_than_its_bytes_is_refused_before_any_is_sent(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(TypeError, match=rf"shape .* cannot be sent to other ranks: .*{why}"):
        objects.decode(objects.encode({"a": [tensor]}))


def test_what_has_no_end_and_what_is_too_long_is_refused() -> None:
    endless: list[Any] = [torch.ones(2)]
    endless.append(endless)
    for value in (endless, 10**5000):
        with pytest.raises(TypeError, match="cannot be sent to other ranks"):
            objects.decode(objects.encode(value))


def test_bytes_hold_a_value_with_all_its_tensors() -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = [base.t(), torch.tensor(True), torch.zeros(0, 2), base.half()[:, 1], torch.tensor([1j]), base.bfloat16()]
    value = {"text": "\u20ac", "nothing": [], "pair": (1, tensors)}
    again = objects.decode(objects.encode(value))
    assert again["text"] == "\u20ac" and again["nothing"] == [] and again["pair"][0] == 1
    for one, other in zip(again["pair"][1], tensors, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
