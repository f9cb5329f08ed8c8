"""Broadcasts: packing of state, the stream of bytes, comparison of lists."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import gcclient
from gcclient import broadcast
from tests.unit.client.fake import FakeDaemon


def test_state_survives_json() -> None:
    tensor = torch.arange(3)
    state = {
        "state": {0: {"step": tensor, "more": [1, (2.5, None)]}, 7: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 7], "name": "x", "flag": True, "e": []}],
        "inf": math.inf,
    }
    found: list[torch.Tensor] = []
    packed = json.loads(json.dumps(broadcast._pack(state, found)))
    assert len(found) == 1 and found[0] is tensor
    assert broadcast._specs(packed) == [([3], "int64")]
    again = broadcast._unpack(packed, found)
    assert again == state and isinstance(again["param_groups"][0]["betas"], tuple)
    assert list(again["state"]) == [0, 7]


@pytest.mark.parametrize("value", [object(), {"a": {1.5: 2}}, {"a": {True: 2}}, [lambda: 0]])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="optimizer state"):
        broadcast._pack(value, [])


def test_a_stream_is_cut_anywhere() -> None:
    arrays = [np.arange(n, dtype=np.uint8) for n in (5, 0, 1, 7)]
    whole = np.concatenate(arrays)
    stream = broadcast._Stream(arrays)
    assert stream.nbytes == 13
    for lo in range(13):
        for hi in range(lo + 1, 14):
            out = np.full(hi - lo, 255, np.uint8)
            for offset, piece in stream.pieces(lo, hi):
                out[offset : offset + piece.nbytes] = piece
            assert np.array_equal(out, whole[lo:hi])


def test_the_first_difference_is_named_with_both_values() -> None:
    one, two = ["w", [3], "float32"], ["b", [2], "float32"]
    assert broadcast._difference([one, two], [one, two], 1, 0) == ""
    text = broadcast._difference([one, ["b", [4], "float32"]], [one, two], 1, 0)
    assert "tensor 1" in text and "'b' shape [4]" in text and "shape [2]" in text and "rank 1" in text
    text = broadcast._difference([one], [one, two], 2, 0)
    assert "rank 2 gives 1" in text and "'b' is only on rank 0" in text


def test_alone_a_broadcast_changes_nothing(joined: FakeDaemon) -> None:
    model = torch.nn.Linear(300, 2000)
    before = [p.detach().clone() for p in model.parameters()]
    gcclient.broadcast_parameters(model.state_dict())
    gcclient.broadcast_parameters(dict(model.named_parameters()).items())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    gcclient.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.5))
    with pytest.raises(ValueError, match=r"0\.\.0"):
        gcclient.broadcast_parameters({}, root_rank=1)


def test_a_large_model_does_not_need_its_size_again(joined: FakeDaemon) -> None:
    gcclient.broadcast_parameters({"large": torch.randn(6 << 20)})
    arena = sum(sum(p.chunks) for p in joined.domains[1].plans)
    assert arena < 4 * broadcast.STAGES[-1] + (4 << 20) < 24 << 20
