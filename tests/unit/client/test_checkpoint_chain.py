"""Jobs that go on from one another: what one of them has not used yet, the next one still has.

What may live here: tests of `gcclient/checkpoint.py` over several jobs, and of the order in which things are declared
and asked for in them. What may not: one save and one load (`test_checkpoint.py`), real daemons.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import gcclient
from gcclient import optimizer
from gcclient.api import current
from gcclient.hierarchy import Nodes
from gcproto.messages import DeclareSection
from gcproto.packed import Message
from gcproto.states import AskStates, StatesKept
from tests.unit.client.remembering import Memory, declared, model_of, rejoin, trained

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


def test_a_single_tensor_that_is_not_pushed_meanwhile_is_in_the_next_checkpoint(memory: Memory) -> None:
    push("rare", "often")
    first = go_on(memory)
    push("often")
    second = gcclient.state_dict()
    assert tensors(second).keys() == tensors(first).keys() and len(tensors(first)) == 6


def test_single_tensors_lie_where_they_lay_in_whatever_order_they_are_pushed(memory: Memory) -> None:
    """What a codec draws depends on the place of a block."""
    push("x", "y", "z")
    go_on(memory)
    push("z")
    assert sections(memory) == ["x", "y", "z"]
    push("x", "new")
    assert sections(memory) == ["x", "y", "z", "new"]
    assert gcclient.push_pull(torch.full((20_000,), 2.0), "y", compression=CODEC)[7] == 2.0


def test_a_tensor_that_is_never_compressed_keeps_its_place_too(memory: Memory) -> None:
    gcclient.push_pull(torch.ones(3, dtype=torch.int64), "count", average=False)
    gcclient.push_pull(torch.ones(3), "x")
    go_on(memory)
    gcclient.push_pull(torch.ones(3), "x")
    assert sections(memory) == ["count", "x"]


def test_a_single_tensor_of_another_shape_is_refused_or_dropped_and_counted(memory: Memory) -> None:
    push("x", "y")
    state = go_on(memory)
    with pytest.raises(
        gcclient.StateMismatch, match=r"'x' shape \[7\] dtype F32 has shape \[20000\] in the checkpoint"
    ):
        push("x", size=7)
    rejoin(memory.daemon)
    gcclient.load_state_dict(state, strict=False)
    push("x", size=7)
    assert gcclient.stats()["states_dropped"] == 2, "the contribution's and the owner's"
    found = tensors(gcclient.state_dict())
    assert {k.split("/")[3] for k in found} == {"x[0:7]", "x[0:7]+", "y[0:20000]", "y[0:20000]+"}


def test_a_single_tensor_that_does_not_fit_leaves_the_others_theirs(memory: Memory) -> None:
    """Their domain is declared, with what was loaded of it; the same may be loaded again to drop what does not fit."""
    push("x", "y")
    state = go_on(memory)
    for _ in range(2):
        with pytest.raises(gcclient.StateMismatch, match=r"has shape \[20000\].*What to do: load it with strict=False"):
            push("x", size=7)
    assert sections(memory) == ["x", "y"], "as they lay, and nothing else"
    gcclient.load_state_dict(state, strict=False)
    push("x", size=7)
    push("y")
    assert sections(memory) == ["x", "y", "x"]
    assert gcclient.stats()["states_dropped"] == 2


def test_a_second_model_that_does_not_fit_leaves_the_first_one_its_own(memory: Memory) -> None:
    for _ in range(2):
        trained(model_of(), compression=CODEC)
    state = go_on(memory)
    trained(model_of(), compression=CODEC)
    first = dict(memory.given)
    with pytest.raises(gcclient.StateMismatch, match=r"optimizer\.1: .*has shape \[250, 300\]"):
        trained(model_of(301), compression=CODEC)
    gcclient.load_state_dict(state, strict=False)
    assert {k: v for k, v in tensors(gcclient.state_dict()).items() if "optimizer.0" in k}
    trained(model_of(301), compression=CODEC)
    assert [d.label for d in declared(memory.daemon)] == ["optimizer.0", "optimizer.1"]
    assert all(d.resumed is not None for d in declared(memory.daemon)) and len(memory.given) >= len(first)
    other = {k: v.replace('"steps":1', '"steps":2') if isinstance(v, str) else v for k, v in state.items()}
    with pytest.raises(gcclient.StateMismatch, match=r"optimizer\.0 was declared before its checkpoint was loaded"):
        gcclient.load_state_dict(other, strict=False)


def test_or_the_model_begins_with_nothing(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    go_on(memory)
    with pytest.raises(gcclient.StateMismatch, match=r"or {'format': 1} to begin with no residual; then declare again"):
        trained(model_of(301), compression=CODEC)
    gcclient.load_state_dict({"format": 1})
    trained(model_of(301), compression=CODEC)
    assert [(d.label, d.resumed) for d in declared(memory.daemon)] == [("optimizer.0", None)] and not memory.given


def test_shards_that_do_not_fit_are_refused_before_the_model_is_declared(
    memory: Memory, torch_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "nodes_of", lambda *_: Nodes((0,), 0, 1, (0,), (1, 1)))
    trained(model_of(), compression=CODEC, hierarchy=True)
    labels = [d.label for d in declared(memory.daemon)]
    state = go_on(memory)
    with pytest.raises(gcclient.StateMismatch, match=r"has shape \[75000\] in the checkpoint"):
        trained(model_of(301), compression=CODEC, hierarchy=True)
    assert not memory.daemon.domains
    gcclient.load_state_dict(state, strict=False)
    trained(model_of(301), compression=CODEC, hierarchy=True)
    assert [d.label for d in declared(memory.daemon)] == labels
    assert [d.resumed is not None for d in declared(memory.daemon)] == [False, True]


def test_more_than_a_block_can_have_is_refused_or_dropped(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    state = gcclient.state_dict()
    key = next(k for k in state if k.endswith("+"))
    about = msgspec.json.decode(state["rank 0/optimizer.0"])
    for block in about["blocks"]:
        name, first, last = block[1][0]
        if key.endswith(f"contribution/{name}[{first}:{last}]+") and block[0] == 0:
            more = 5 * sum(b - a for _, a, b in block[1]) + 1000
            block[2], state[key] = block[2] - state[key].numel() + more, torch.ones(more)
    state["rank 0/optimizer.0"] = msgspec.json.encode(about).decode()
    rejoin(memory.daemon)
    gcclient.load_state_dict(state)
    with pytest.raises(gcclient.StateMismatch, match=r"floats are saved of a block of optimizer\.0, at most"):
        trained(model_of(), compression=CODEC)
    gcclient.load_state_dict(state, strict=False)
    trained(model_of(), compression=CODEC)
    assert gcclient.stats()["states_dropped"] == 1 and memory.given


def test_what_does_not_fit_is_refused_as_often_as_it_is_tried(memory: Memory) -> None:
    """Who goes on after a refusal must not find itself without what was held back."""
    push("x")
    state = gcclient.state_dict()
    about = f"domain/calls with {CODEC}"
    state[about] = state[about].replace('"nodes":[[0]]', '"nodes":[[0],[1]]')
    rejoin(memory.daemon)
    gcclient.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(gcclient.StateMismatch, match="spread over nodes as"):
            push("x")
    gcclient.load_state_dict(state, strict=False)
    push("x")
    assert memory.given


def test_what_belongs_to_blocks_as_they_were_cut_is_refused_or_dropped_and_the_residual_goes_on(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    state = go_on(memory)
    with pytest.raises(gcclient.StateMismatch, match="are cut or owned otherwise now, so that what the codec keeps"):
        trained(model_of(), compression=CODEC, groups="layer-wise")
    assert not memory.daemon.domains and not memory.given
    gcclient.load_state_dict(state, strict=False)
    trained(model_of(), compression=CODEC, groups="layer-wise")
    assert gcclient.stats()["states_dropped"] > 0 and memory.given


def test_a_model_under_another_name_than_it_was_saved_is_warned_of(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    trained(model_of(), compression=CODEC)
    go_on(memory)
    session = current()
    session.models["optimizer", (0,)] = 1  # another one was made before it
    trained(model_of(), compression=CODEC)
    assert "optimizer.1 is not in the checkpoint, which has optimizer.0: it begins without" in caplog.text
    assert not memory.given
    caplog.clear()
    trained(model_of(), compression="none")
    assert "is not in the checkpoint" not in caplog.text, "nothing is held back of it"


def test_what_was_loaded_and_not_declared_yet_is_saved_again_as_it_was(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    push("x")
    first = go_on(memory)
    assert gcclient.state_dict().keys() == first.keys()
    push("x")
    second = gcclient.state_dict()
    assert tensors(second) == tensors(first) and second["domain/optimizer.0"] == first["domain/optimizer.0"]
    rejoin(memory.daemon)
    gcclient.load_state_dict(second)
    trained(model_of(), compression=CODEC)
    assert memory.given and [d.label for d in declared(memory.daemon)] == ["optimizer.0"]


def test_a_model_in_a_type_that_is_never_compressed_is_refused_or_dropped(memory: Memory) -> None:
    trained(model_of(), compression=CODEC)
    state = go_on(memory)
    with pytest.raises(gcclient.StateMismatch, match=r"dtype F64 is never compressed, and is F32 in the checkpoint"):
        _double(model_of())
    gcclient.load_state_dict(state, strict=False)
    _double(model_of())
    assert gcclient.stats()["states_dropped"] > 0 and not memory.given


def _double(model: nn.Module) -> None:
    gcclient.DistributedOptimizer(torch.optim.SGD(model.double().parameters()), model.named_parameters())


def test_two_threads_may_ask_for_states_at_once(memory: Memory) -> None:
    """A lane sends away who asks before it has the last answer."""
    trained(model_of(), compression=CODEC)
    push("x")
    usual, last = memory.answer, max(current().domains)
    waiting: list[AskStates] = []
    early: list[AskStates] = []

    def lane_of(m: AskStates) -> int:
        return memory.daemon.domains[m.domain].blocks[m.key].lane

    def slow(m: Any) -> Message | None:
        """One question stays without an answer until it is given by hand."""
        if isinstance(m, AskStates):
            early.extend(m for other in waiting if lane_of(other) == lane_of(m))
            if m.domain == last and not waiting:
                waiting.append(m)
                return StatesKept(m.domain, m.key + 1, m.owner, m.first)  # no answer to this
        return usual(m)

    memory.daemon.answer = slow
    found: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: found.append(gcclient.state_dict())) for _ in range(2)]
    threads[0].start()
    memory.daemon.wait(lambda: bool(waiting))
    threads[1].start()
    threads[1].join(0.5)
    memory.daemon.answer = usual
    answer = usual(waiting[0])
    assert answer is not None
    memory.daemon.say(lane_of(waiting[0]), answer)
    for thread in threads:
        thread.join(20)
    assert not early and len(found) == 2 and tensors(found[0]) == tensors(found[1])
