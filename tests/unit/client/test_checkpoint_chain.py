"""Jobs that go on from one another: what one of them has not used yet, the next one still has.

What may live here: tests of `gcclient/checkpoint.py` over several jobs, and of the order in which things are declared
and asked for in them. What may not: one save and one load (`test_checkpoint.py`), real daemons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from gcproto.messages import DeclareSection
from tests.unit.client.remembering import Memory, model_of, rejoin, trained

CODEC = "onebit"


def push(*names: str, size: int = 20_000) -> None:
    for name in names:
        gcclient.push_pull(torch.ones(size), name, compression=CODEC)


def tensors(state: dict[str, Any]) -> dict[str, list[float]]:
    return {k: v.tolist() for k, v in state.items() if isinstance(v, torch.Tensor)}


def sections(memory: Memory) -> list[str]:
    return [m.section.tensors[0].name for m in memory.daemon.heard[-1] if isinstance(m, DeclareSection)]


def go_on(memory: Memory, strict: bool = True) -> dict[str, Any]:
    """In a later job, from what this one would save; that too."""
    state = gcclient.state_dict()
    rejoin(memory.daemon)
    gcclient.load_state_dict(state, strict)
    return state


def test_a_model_in_a_type_that_is_never_compressed_is_refused_or_dropped(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    state = go_on(memory)
    with pytest.raises(gcclient.StateMismatch, match=r"dtype F64 is never compressed, and is F32 in the checkpoint"):
        _double(model_of())
    rejoin(memory.daemon)
    gcclient.load_state_dict(state, strict=False)
    _double(model_of())
    assert gcclient.stats()["states_dropped"] > 0 and not memory.given


def _double(model: nn.Module) -> None:
    gcclient.DistributedOptimizer(torch.optim.SGD(model.double().parameters()), model.named_parameters())
