"""What a lane answers of states, and what it takes of those that a worker brings.

What may live here: tests of `gcserver/runtime/checkpoints.py`, over real memory and a real lane machine. What may not:
the connection (`test_laneworkers.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gcproto import states
from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import Hello
from gcproto.records import replace
from gcproto.states import AskStates, BlockStates, GiveStates, StatesKept
from gcserver.codecs import parse
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig
from gcserver.core.rounds import Partition
from gcserver.runtime import checkpoints
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.checkpoints import Checkpoints, Unfit
from gcserver.runtime.resolve import resolve
from gcserver.runtime.statefiles import Heap, MemoryShort
from gcserver.runtime.states import state_use
from tests.unit.runtime.one_block import JOB, N, encode, node, push, random

ID = (JOB, 0)


class Lane:
    """As much of a lane as checkpoints use: node ``me`` of two with one block, which node 0 owns."""

    def __init__(self, folder: Path, me: int = 0, dtype: DType = DType.F32) -> None:
        self.executor, self.memory = node(folder, me, dtype=dtype)
        self.machine = LaneMachine(LaneConfig(Hello("a", "tcp://a:1", 1, 0, 1, "test"), 11, 1000))
        self.machine.on(ev.DomainOpened(self.memory.config, (ev.Plan(0, (), resolve("none")),)), 0.0)
        section = Section(0, (TensorSpec("w", (N,), int(dtype)),))
        self.machine.on(ev.SectionOpened(ID, section, self.memory.space.blocks[0], {}), 0.0)
        self.sent: list[Any] = []
        process: Any = SimpleNamespace(
            executor=self.executor, machine=self.machine, send_up=self.sent.append,
            feed=lambda e: self.machine.on(e, 0.0),
        )  # fmt: skip
        self.checkpoints = Checkpoints(process)
        self.rank = me

    @property
    def partition(self) -> Partition:
        return self.machine.domains[ID].partitions[0]

    def say(self, question: checkpoints.Question) -> Any:
        return self.checkpoints.answer(JOB, self.rank, question)

    def fetch(self, owner: bool = False) -> tuple[BlockStates, np.ndarray]:
        """The last answer, and all floats."""
        parts: list[bytes] = []
        while True:
            answer = self.say(AskStates(0, 0, owner, sum(map(len, parts)) // 4, 0))
            parts.append(answer.data)
            if sum(map(len, parts)) >= 4 * answer.floats:
                return answer, np.frombuffer(b"".join(parts), np.float32)


def give(values: np.ndarray, first: int = 0, **change: Any) -> GiveStates:
    said = GiveStates(0, 0, False, first, len(values), 7, True, values.astype(np.float32).tobytes())
    return GiveStates(*(change.get(f, getattr(said, f)) for f in said.__struct_fields__))


def test_a_block_without_states_has_none(tmp_path: Path) -> None:
    assert Lane(tmp_path).say(AskStates(0, 0, False, 0, 0)) == BlockStates(0, 0, False, 0)


def test_the_settled_version_is_handed_over_in_pieces_and_taken_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it encodes as the first would have gone on."""
    monkeypatch.setattr(checkpoints, "PIECE", 1000)
    lane, other = Lane(tmp_path / "x"), Lane(tmp_path / "y")
    spec = "topk(ratio=0.01)+momentum"
    push(lane.memory, random(1))
    encode(lane.executor, spec, 1, 0)
    lane.memory.flip(0, 1, 1, False)
    answer, values = lane.fetch()
    use = state_use(parse(spec), lane.memory.blocks[0])
    assert use is not None and (answer.floats, answer.tag, answer.held) == (use.floats, use.tag, True)
    assert values.size == 2 * N and values.any()
    for first in range(0, values.size, 1500):
        piece = give(values[first : first + 1500], first, floats=values.size, tag=answer.tag)
        assert other.say(piece) == StatesKept(0, 0, False, first)
        assert other.partition.residual.held == (1 if first + 1500 >= values.size else 0), "with the last piece"
    assert other.fetch()[1].tobytes() == values.tobytes()
    payloads = []
    for one, step, read in ((lane, 2, 1), (other, 1, 0)):
        push(one.memory, random(2))
        made = encode(one.executor, spec, step, read)
        payloads.append(bytes(one.executor.handles.table[made.handle]))  # type: ignore[index]
    assert payloads[0] == payloads[1]


def test_a_lane_that_was_restarted_finds_what_was_brought(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.say(give(random(3), owner=True))
    again = DomainMemory(lane.memory.config, 1, 0, lane.memory.directory)
    (known,) = again.open_section(Section(0, (TensorSpec("w", (N,), 0),))).values()
    assert known.owner_residual.holds and not known.residual.holds
    found = again.settled_states(0, True)
    assert found is not None and found[0].tobytes() == random(3).tobytes() and found[1:] == (7, True)


def test_what_was_brought_is_taken_up_by_a_dense_codec(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.say(give(random(3)))
    read, write = lane.partition.residual.current, 1 - lane.partition.residual.current
    assert lane.partition.residual.holds
    assert lane.memory.drain(0, 1, read, False).tobytes() == random(3).tobytes() and write == 1
    lane.say(give(random(4), held=False))
    assert not lane.memory.settled_states(0, False)[2]  # type: ignore[index]


NOT_YET = [
    AskStates(0, 0, False, 0, 3), AskStates(0, 64, False, 0, 0), AskStates(5, 0, False, 0, 0),
    give(np.zeros(N), key=64), give(np.zeros(N), domain=9),
]  # fmt: skip


@pytest.mark.parametrize("question", NOT_YET, ids=lambda question: type(question).__name__)
def test_what_is_not_there_or_not_settled_yet_is_waited_for(tmp_path: Path, question: checkpoints.Question) -> None:
    lane = Lane(tmp_path)
    assert lane.say(question) is None
    if isinstance(question, AskStates) and question.step:
        for step in (1, 2, 3):
            assert lane.say(question) is None
            lane.machine.on(ev.Settled(ID, step, False, 0), 0.0)
        assert lane.say(question) == BlockStates(0, 0, False, 0)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"floats": N - 1, "data": bytes(4)}, f"brings {N - 1} floats of block 0, expected {N} to"),
        ({"floats": states.most_floats(N, 1) + 1}, f"expected {N} to {states.most_floats(N, 1)}"),
        ({"data": b""}, "0 bytes from float 0 on"),
        ({"data": b"abc"}, "3 bytes from float 0 on"),
        ({"first": 1}, f"{4 * N} bytes from float 1 on of {N}"),
        ({"first": (1 << 63) - 1}, "from float 9223372036854775807 on"),
        ({"data": np.full(N, np.nan, np.float32).tobytes()}, "is not finite"),
        ({"data": np.full(N, np.inf, np.float32).tobytes()}, "is not finite"),
    ],
)
def test_what_cannot_be_a_state_is_refused_before_memory_is_taken(
    tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    lane = Lane(tmp_path)
    with pytest.raises(Unfit) as error:
        lane.say(give(np.zeros(N), **change))
    assert part in error.value.why.message and error.value.why.kind == "NotRegistered"
    assert lane.memory.heap.nbytes == 0


def test_whose_states_a_rank_may_bring(tmp_path: Path) -> None:
    lane = Lane(tmp_path, me=1)
    with pytest.raises(Unfit, match="which another node owns"):
        lane.say(give(np.zeros(N), owner=True))
    with pytest.raises(Unfit, match="that rank 0 is not in"):
        lane.checkpoints.answer(JOB, 0, give(np.zeros(N)))
    with pytest.raises(Unfit, match="that rank 7 is not in"):
        lane.checkpoints.answer(JOB, 7, AskStates(0, 0, False, 0, 0))
    lane.memory.config = replace(lane.memory.config, ranks=(0, 1))
    with pytest.raises(Unfit, match="rank 1 brings states; those of a node are brought by its first rank"):
        lane.say(give(np.zeros(N)))
    whole = Lane(tmp_path / "f64", dtype=DType.F64)
    with pytest.raises(Unfit, match="never compressed"):
        whole.say(give(np.zeros(N)))


def test_another_job_is_not_there_for_a_worker(tmp_path: Path) -> None:
    """A worker names a domain, and its connection the job."""
    lane = Lane(tmp_path)
    assert lane.checkpoints.answer(b"t" * 16, 0, AskStates(0, 0, False, 0, 0)) is None
    assert lane.checkpoints.answer(b"t" * 16, 0, give(random(1))) is None
    assert lane.memory.heap.nbytes == 0


def test_nothing_is_brought_once_a_block_was_exchanged(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.machine.on(ev.Pushed(ID, 0, 1, (0,), True, 2), 0.0)
    with pytest.raises(Unfit, match="after that was first exchanged"):
        lane.say(give(np.zeros(N)))


def test_brought_again_it_takes_the_same_memory_and_no_other(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    lane.say(give(random(1)))
    taken = lane.memory.heap.nbytes
    lane.say(give(random(2)))
    assert lane.memory.heap.nbytes == taken and lane.fetch()[1].tobytes() == random(2).tobytes()
    with pytest.raises(Unfit, match="has brought another number before"):
        lane.say(give(np.zeros(N + 1)))
    assert lane.memory.heap.nbytes == taken


def test_memory_that_is_short_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(tmp_path)

    def short(heap: Heap, size: int) -> tuple[int, int]:
        raise MemoryShort(28, "1 MiB of shared memory cannot be had")

    monkeypatch.setattr(Heap, "allocate", short)
    assert lane.say(give(random(1))) is None
    ((job, kind, text),) = [(m.job, m.kind, m.message) for m in lane.sent]
    assert (job, kind) == (JOB, "OutOfMemory") and "states of a checkpoint cannot be taken" in text
