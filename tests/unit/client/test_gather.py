"""Gathering, in a world of one; tests/integration has more ranks."""

from __future__ import annotations

import pytest
import torch

import gcclient
from tests.unit.client.fake import FakeDaemon


def test_alone_one_gathers_what_one_has(joined: FakeDaemon) -> None:
    for tensor in (torch.randn(3, 2), torch.zeros(0, 4), torch.tensor([True]), torch.arange(6.0).view(2, 3).t()):
        gathered = gcclient.allgather(tensor, name="x")
        assert torch.equal(gathered, tensor) and gathered.dtype is tensor.dtype
    assert gcclient.allgather_object({"loss": (0.5, None)}) == [{"loss": (0.5, None)}]
    with pytest.raises(TypeError, match="rank 0: a set cannot be sent"):
        gcclient.allgather_object({1, 2})


def test_what_has_no_first_dimension_is_refused_before_anything_is_sent(joined: FakeDaemon) -> None:
    for tensor in (torch.tensor(1.0), torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match="cannot be gathered"):
            gcclient.allgather(tensor)
    assert not joined.domains


def test_names_of_scripts_are_not_in_the_way(joined: FakeDaemon) -> None:
    """As a barrier Horovod's scripts reduce a number by that name."""
    for name in ("barrier", "gather.lengths.1", "broadcast.head"):
        gcclient.allreduce(torch.tensor(0.0), name=name)
    gcclient.barrier()
    assert gcclient.broadcast(torch.ones(2)).tolist() == [1.0, 1.0]
    assert gcclient.allgather(torch.ones(2)).tolist() == [1.0, 1.0]
