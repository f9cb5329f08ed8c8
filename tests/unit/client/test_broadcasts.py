"""Broadcasts: the stream of bytes, comparison of lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gcclient
from gcclient import broadcasts
from tests.unit.client.fake import FakeDaemon


def test_a_stream_is_cut_anywhere() -> None:
    arrays = [np.arange(n, dtype=np.uint8) for n in (5, 0, 1, 7)]
    whole = np.concatenate(arrays)
    stream = broadcasts.Stream(arrays)
    assert stream.nbytes == 13
    for lo in range(13):
        for hi in range(lo + 1, 14):
            out = np.full(hi - lo, 255, np.uint8)
            for offset, piece in stream.pieces(lo, hi):
                out[offset : offset + piece.nbytes] = piece
            assert np.array_equal(out, whole[lo:hi])


def test_the_first_difference_is_named_with_both_values() -> None:
    one, two = ["w", [3], "float32"], ["b", [2], "float32"]
    assert broadcasts._difference([one, two], [one, two], 1, 0) == ""
    text = broadcasts._difference([one, ["b", [4], "float32"]], [one, two], 1, 0)
    assert "tensor 1" in text and "'b' shape [4]" in text and "shape [2]" in text and "rank 1" in text
    text = broadcasts._difference([one], [one, two], 2, 0)
    assert "rank 2 gives 1" in text and "'b' is only on rank 0" in text


def test_alone_a_broadcast_changes_nothing(joined: FakeDaemon) -> None:
    model = torch.nn.Linear(300, 2000)
    before = [p.detach().clone() for p in model.parameters()]
    gcclient.broadcast_parameters(model.state_dict())
    gcclient.broadcast_parameters(dict(model.named_parameters()).items())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    gcclient.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.5))
    halves = torch.arange(6.0).view(2, 3)[:, ::2]
    copy = gcclient.broadcast(halves, 0, "halves")
    assert torch.equal(copy, halves) and copy.data_ptr() != halves.data_ptr()
    assert gcclient.broadcast_(halves) is halves
    with pytest.raises(ValueError, match=r"0\.\.0"):
        gcclient.broadcast_parameters({}, root_rank=1)


def test_a_tensor_that_is_more_than_its_bytes_is_named(joined: FakeDaemon) -> None:
    with pytest.raises(TypeError, match=r"'w' on rank 0 cannot be broadcast: .*to_dense"):
        gcclient.broadcast_parameters({"v": torch.ones(2), "w": torch.ones(2).to_sparse()})


def test_a_large_model_does_not_need_its_size_again(joined: FakeDaemon) -> None:
    gcclient.broadcast_parameters({"large": torch.randn(6 << 20)})
    arena = sum(sum(p.chunks) for p in joined.domains[1].plans)
    assert arena < 4 * broadcasts.STAGES[-1] + (4 << 20) < 24 << 20


def test_a_value_is_its_own_at_the_root_and_never_pickled(joined: FakeDaemon) -> None:
    given = {"best": (0.5, None), 3: torch.ones(2)}
    assert gcclient.broadcast_object(given) is given
    assert gcclient.broadcast_object() is None
    with pytest.raises(TypeError, match="rank 0: a set cannot be sent to other ranks, and nothing is pickled"):
        gcclient.broadcast_object({1, 2}, name="set")
    gcclient.barrier()
