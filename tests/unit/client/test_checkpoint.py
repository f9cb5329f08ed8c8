"""Saving and loading at a worker: what is asked of the daemon, what is brought to it, what is refused before that.

What may live here: tests of `gcclient/checkpoint.py` and `state_dicts.py` against a fake daemon. What may not: what a
checkpoint holds (`test_saved.py`), real daemons (`tests/integration/test_checkpoint.py`).
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import gcclient
from gcclient.api import current
from gcproto import messages
from gcproto.agreed import DeclareDomain, Resumed
from gcproto.epoch_messages import DomainFacts
from gcproto.lane_messages import Push
from gcproto.packed import Message
from gcproto.states import AskStanding, AskStates, GiveStates, Standing, StatesKept
from tests.unit.client.fake import PARTITION, FakeDaemon
from tests.unit.client.remembering import RESUMED, Memory, declared, model_of, rejoin, trained


def test_what_the_daemon_holds_back_is_saved_and_brought_to_a_later_job(memory: Memory) -> None:
    trained(model_of(), compression="onebit")
    state = gcclient.state_dict()
    blocks = {b.key: b for d in memory.daemon.domains.values() for b in d.blocks.values() if b.dtype == 0}
    assert len(blocks) > 1 and max(b.nbytes for b in blocks.values()) <= PARTITION
    (number,) = memory.daemon.domains
    rejoin(memory.daemon)
    gcclient.load_state_dict(state)
    trained(model_of(), compression="onebit")
    assert [d.resumed for d in declared(memory.daemon)] == [RESUMED]
    assert set(memory.given) == {(key, owner) for key in blocks for owner in (False, True)}
    for (key, owner), said in memory.given.items():
        assert memory.brought(key, owner).tobytes() == memory.values(number, key, owner).tobytes()
        assert {(m.tag, m.held, m.floats) for m in said} == {(5, True, memory.brought(key, owner).size)}
        assert [m.first for m in said] == list(range(0, said[0].floats, 20_000))
    for heard in memory.daemon.heard[:-1]:
        kinds = [type(m) for m in heard if isinstance(m, GiveStates | Push)]
        assert kinds == sorted(kinds, key=lambda kind: kind is Push), "all states before the first push"
    assert gcclient.stats()["states_dropped"] == 0


def test_lossless_groups_and_blocks_without_states_save_nothing(memory: Memory) -> None:
    memory.held = False
    gcclient.push_pull(torch.ones(4))
    gcclient.push_pull(torch.ones(4), "exact", compression="none")
    assert gcclient.state_dict() == {"format": 1}
    gcclient.push_pull(torch.ones(4), "named")
    assert sorted(gcclient.state_dict()) == ["domain/calls", "format", "rank 0/calls"]


def test_saving_waits_until_the_last_step_is_settled(memory: Memory) -> None:
    memory.settled = 0
    trained(model_of())
    done = threading.Event()
    thread = threading.Thread(target=lambda: (gcclient.state_dict(), done.set()))
    thread.start()
    memory.daemon.wait(lambda: sum(isinstance(m, AskStanding) for m in memory.daemon.heard[-1]) > 2)
    assert not done.is_set() and not any(isinstance(m, AskStates) for lane in memory.daemon.heard for m in lane)
    memory.settled = 1
    thread.join(10)
    assert done.is_set()
    asked = [m for lane in memory.daemon.heard for m in lane if isinstance(m, AskStates)]
    assert asked and {m.step for m in asked} == {1}


def test_a_step_that_never_settles_is_a_timeout(memory: Memory) -> None:
    memory.settled = 0
    trained(model_of())
    session = current()
    session.registered = messages.Registered(**{**_fields(session.job), "deadline": 0.05})
    with pytest.raises(gcclient.StepTimeout, match=r"step 1 of optimizer.0 was not settled.*phase checkpoint"):
        gcclient.state_dict()


def _fields(message: Any) -> dict[str, Any]:
    return {f: getattr(message, f) for f in message.__struct_fields__}


def test_saving_in_the_middle_of_a_step_is_refused(memory: Memory) -> None:
    model = model_of()
    optimizer = trained(model, backward_passes_per_step=1)
    model[0](torch.ones(1, 300)).sum().backward()  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"in the middle of step 2 of optimizer.0: call it after optimizer.step\(\)"):
        gcclient.state_dict()
    optimizer.step()
    assert "domain/optimizer.0" in gcclient.state_dict()


def test_a_question_is_asked_again_at_a_restarted_daemon(memory: Memory) -> None:
    trained(model_of(), compression="onebit")
    usual, first = memory.answer, threading.Event()

    def once_deaf(m: Any) -> Message | None:
        if isinstance(m, AskStates | AskStanding) and not first.is_set():
            if isinstance(m, AskStates):
                first.set()
            crashed.append(type(m))
            return StatesKept(m.domain, 1 << 40, False, 0) if isinstance(m, AskStates) else Standing(1 << 40)
        return usual(m)

    crashed: list[type] = []
    memory.daemon.answer = once_deaf
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(gcclient.state_dict()))
    thread.start()
    memory.daemon.wait(lambda: AskStanding in crashed)
    memory.daemon.answer = usual
    memory.daemon.hang_up(-1)  # it is asked again with Reattach
    thread.join(10)
    assert found and found[0] == {**found[0]} and any(isinstance(v, torch.Tensor) for v in found[0].values())


def test_a_lane_that_is_restarted_is_asked_again(memory: Memory) -> None:
    trained(model_of(), compression="onebit")
    usual, asked = memory.answer, threading.Event()

    def stale(m: Any) -> Message | None:
        if isinstance(m, AskStates) and not asked.is_set():
            asked.set()
            return StatesKept(m.domain, m.key + 1, m.owner, m.first)  # the answer to another question
        return usual(m)

    memory.daemon.answer = stale
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(gcclient.state_dict()))
    thread.start()
    memory.daemon.wait(asked.is_set)
    for lane in range(memory.daemon.lanes):
        memory.daemon.hang_up(lane)
    thread.join(10)
    assert found and any(isinstance(v, torch.Tensor) for v in found[0].values())


def test_what_is_declared_already_is_not_loaded(memory: Memory) -> None:
    trained(model_of(), compression="onebit")
    state = gcclient.state_dict()
    with pytest.raises(gcclient.StateMismatch, match=r"optimizer.0 was declared before its.*\(\) after init"):
        gcclient.load_state_dict(state)
    assert gcclient.push_pull(torch.ones(2)).tolist() == [1.0, 1.0], "nothing has failed"
    with pytest.raises(gcclient.StateMismatch, match="there is no 'format'"):
        gcclient.load_state_dict({})


def _loaded(memory: Memory, strict: bool, **change: Any) -> dict[str, Any]:
    """What a job of one model saved, in another job."""
    trained(model_of(), compression="onebit")
    state = gcclient.state_dict()
    for key, (old, new) in change.items():
        name = "domain/optimizer.0" if key == "domain" else key
        state[name] = state[name].replace(old, new)
    rejoin(memory.daemon)
    gcclient.load_state_dict(state, strict)
    return state


def _narrow() -> nn.Module:
    first, _ = model_of()
    return nn.Sequential(first)


CHANGES: list[tuple[dict[str, Any], Any, str]] = [
    ({"domain": ('"ranks":[0]', '"ranks":[0,1]')}, model_of, "ranks 0, 1 saved it, ranks 0 declare it"),
    ({"domain": ('"nodes":[[0]]', '"nodes":[[0],[1]]')}, model_of, "spread over nodes as 0 | 1, and are now as 0"),
    ({}, lambda: model_of(301), "'0.weight' shape [250, 301] dtype F32 has shape [250, 300] in the checkpoint"),
    ({}, lambda: nn.Sequential(*model_of(), nn.Linear(2, 9)), "'2.bias' shape [9] dtype F32 is not in the checkpoint"),
    ({}, _narrow, "'1.bias' is in the checkpoint and is not declared (2 in all)"),
]


@pytest.mark.parametrize(("change", "model", "part"), CHANGES, ids=["ranks", "nodes", "shape", "new", "missing"])
def test_what_does_not_fit_is_refused_by_name_and_its_advice_can_be_followed(
    memory: Memory, change: Any, model: Any, part: str
) -> None:
    """Nothing is declared by then: the model goes by the name that it was saved under when it is declared again."""
    state = _loaded(memory, True, **change)
    for _ in range(2):
        with pytest.raises(gcclient.StateMismatch) as error:
            trained(model(), compression="onebit")
        assert part in str(error.value)
        assert "What to do: load it with strict=False" in str(error.value) and "declare again" in str(error.value)
    assert current().failure is None and not memory.daemon.domains and not current().models
    gcclient.load_state_dict(state, strict=False)
    trained(model(), compression="onebit")
    (again,) = declared(memory.daemon)
    assert again.label == "optimizer.0"
    if not part.startswith("ranks"):
        assert again.resumed is not None
        assert memory.given or part.startswith("'0.weight'"), "what fits is brought"


@pytest.mark.parametrize(("change", "model", "part"), CHANGES, ids=["ranks", "nodes", "shape", "new", "missing"])
def test_or_dropped_with_a_warning_and_counted(
    memory: Memory, change: Any, model: Any, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    _loaded(memory, False, **change)
    trained(model(), compression="onebit")
    assert part in caplog.text
    dropped = gcclient.stats()["states_dropped"]
    if part.startswith(("ranks", "'0.weight'", "'1.bias'")):
        assert dropped > 0 and "is dropped" in caplog.text
    fresh = [d.resumed is None for d in declared(memory.daemon)]
    assert fresh == [part.startswith("ranks")]


@pytest.mark.parametrize(
    ("label", "strict", "refused"),
    [("optimizer.0", True, True), ("optimizer.0", False, False), ("optimizer.1", True, False), ("calls", True, False)],
)
def test_a_model_that_other_ranks_saved_is_not_begun_anew_in_silence(
    memory: Memory, caplog: pytest.LogCaptureFixture, label: str, strict: bool, refused: bool
) -> None:
    """As where models were saved in shards, and are declared without them."""
    trained(model_of(), compression="onebit")
    state = {k.replace("optimizer.0", f"{label} of ranks 0,1"): v for k, v in gcclient.state_dict().items()}
    state[f"domain/{label} of ranks 0,1"] = state[f"domain/{label} of ranks 0,1"].replace(
        '"ranks":[0]', '"ranks":[0,1]'
    )
    rejoin(memory.daemon)
    gcclient.load_state_dict(state, strict)
    why = "ranks 0, 1 saved it, ranks 0 declare it"
    if refused:
        with pytest.raises(gcclient.StateMismatch, match=why):
            trained(model_of(), compression="onebit")
    else:
        trained(model_of(), compression="onebit")
    assert (why in caplog.text) is (not strict)


def test_another_codec_takes_the_residual_and_not_the_plan(memory: Memory) -> None:
    _loaded(memory, True)
    trained(model_of(), compression="topk(ratio=0.1)")
    assert [d.resumed for d in declared(memory.daemon)] == [Resumed(b"o" * 16, 1, (9,))]
    assert memory.given


def test_single_tensors_are_brought_theirs_when_the_first_of_them_is_pushed(memory: Memory) -> None:
    gcclient.push_pull(torch.ones(20_000), "x", compression="onebit")
    state = gcclient.state_dict()
    rejoin(memory.daemon)
    gcclient.load_state_dict(state)
    gcclient.push_pull(torch.ones(5), "new", compression="topk(ratio=0.1)")
    assert not memory.given
    gcclient.push_pull(torch.ones(5), "new", compression="onebit")
    assert sorted(owner for _, owner in memory.given) == [False, True]
    assert [d.resumed for d in declared(memory.daemon)] == [None, RESUMED]


def test_what_was_never_saved_of_this_rank_is_missed(memory: Memory) -> None:
    trained(model_of(), compression="onebit")
    state = {k: v for k, v in gcclient.state_dict().items() if not k.startswith("rank 0/")}
    rejoin(memory.daemon)
    gcclient.load_state_dict(state)
    with pytest.raises(gcclient.StateMismatch, match="what rank 0 saved is not in it; each rank loads its own"):
        trained(model_of(), compression="onebit")


def test_it_goes_through_torchs_distributed_checkpoint(memory: Memory, tmp_path: Any) -> None:
    trained(model_of(), compression="onebit")
    state = gcclient.state_dict()
    other = {"rank 1/optimizer.0": "not this rank's"}
    dcp.save({"gradcomm": {**state, **other}, "more": {"x": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)
    reader = dcp.FileSystemReader(tmp_path)
    room = {"gradcomm": gcclient.state_template(reader.read_metadata())}
    assert set(room["gradcomm"]) == set(state)
    dcp.load(room, storage_reader=reader, no_dist=True)
    for key, value in state.items():
        came = room["gradcomm"][key]
        assert torch.equal(came, value) if isinstance(value, torch.Tensor) else came == value
    assert gcclient.state_template(reader.read_metadata(), "nothing") == {}


def test_without_a_daemon_there_is_nothing_to_save_or_load(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(model_of(), compression="onebit")
    state = gcclient.state_dict()
    gcclient.shutdown()
    monkeypatch.setenv("GC_DISABLE", "1")
    gcclient.init(0, 1)
    assert gcclient.state_dict() == {"format": 1}
    gcclient.load_state_dict(state)
    with pytest.raises(gcclient.StateMismatch):
        gcclient.load_state_dict({})
    gcclient.shutdown()
    with pytest.raises(gcclient.NotInitialized):
        gcclient.state_dict()
    monkeypatch.delenv("GC_DISABLE")
    gcclient.init(0, 1, socket=memory.daemon.socket, job="unit")


def test_who_comes_into_a_running_job_declares_what_the_others_did(memory: Memory) -> None:
    """Whatever checkpoint its script has loaded: it begins without residuals, and ranks must declare alike."""
    _loaded(memory, True)
    session = current()
    there = DeclareDomain("optimizer.0", 77, (0,), True, "onebit", resumed=Resumed(b"x" * 16, 40))
    session.found[77] = DomainFacts(there, (), 3, ((0, 0),))
    mine = DeclareDomain("optimizer.0", 77, (0,), True, "onebit")
    assert session.checkpoints.resumed(mine) == there
    assert session.checkpoints.resumed(mine) == there and not session.checkpoints._resuming


@pytest.mark.parametrize("commits", [False, True])
def test_of_a_block_that_may_have_come_here_with_a_loss_the_owners_states_are_asked(
    daemon: FakeDaemon, commits: bool
) -> None:
    daemon.commits = commits
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    memory = Memory(daemon)
    gcclient.push_pull(torch.ones(4), "x")
    (domain,) = current().domains.values()
    domain.me = 1  # the block is another's
    domain.nodes = ((5,), (0,))
    gcclient.state_dict()
    asked = {m.owner for lane in memory.daemon.heard for m in lane if isinstance(m, AskStates)}
    assert asked == ({False, True} if commits else {False})
    gcclient.shutdown()
