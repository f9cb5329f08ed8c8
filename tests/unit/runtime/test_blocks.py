"""What a lane's files remember of a block.

What may live here: tests of `gcserver/runtime/blocks.py`. What may not: states of codecs (`test_states.py`).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gcproto import slots
from gcproto.manifest import AddressSpace, Section, TensorSpec, tensors_inside
from gcproto.records import replace
from gcproto.wire import Flag
from gcserver.core.events import DomainConfig, Member, Retained, StepRecord
from gcserver.runtime.blocks import DomainMemory, segment_shapes
from gcserver.runtime.statefiles import MemoryDamaged
from tests.unit.runtime.one_block import JOB, SECTION, node


def test_a_step_that_only_some_ranks_pushed_is_remembered_as_they_asked_for_it(tmp_path: Path) -> None:
    config = DomainConfig(JOB, 0, "calls", 1, (Member(1, "a", 2),), 0, 2, 2, 256, 65536, (0, 1))
    memory = DomainMemory(config, 1, 0, tmp_path)
    memory.open_section(SECTION)
    state = memory.blocks[0]
    for rank, step, flags in ((0, 1, int(Flag.AVERAGE)), (1, 1, int(Flag.AVERAGE)), (1, 2, 0)):
        slots.commit_push(state.arena, state.slot, rank, step, flags, 1.0)
    again = DomainMemory(config, 1, 0, tmp_path).open_section(SECTION)
    assert (again[0].pushed, again[0].push_flags) == ((1, 2), 0)


def test_an_epoch_takes_back_what_an_earlier_one_left(tmp_path: Path) -> None:
    config = DomainConfig(JOB, 0, "calls", 1, (Member(1, "a", 1), Member(2, "b", 1)), 0, 1, 2, 256, 65536, (0,))
    memory = DomainMemory(config, 1, 0, tmp_path)
    memory.open_section(SECTION)
    state = memory.blocks[0]
    slots.commit_output(state.arena, state.slot, 3, 0, 0)
    memory.make_kept(0, 1, 64)
    memory.commit_kept(0, 1, Retained(3, 1, None, 64, 9, 1, 0, 0, 0))
    memory.log_step(StepRecord(3, False, 0, 7, 1))
    following = replace(config, epoch=2, members=config.members[:1], origin=2, remaining=((0,),), begins=2)
    again = DomainMemory(following, 1, 0, tmp_path)
    known = again.open_section(SECTION)[0]
    assert (known.epoch, known.out_step, [k.step for k in known.retained]) == (1, 3, [3])
    assert [(r.step, r.epoch) for r in again.finished(2)] == [(3, 1)]
    again.enter_epoch(0, 2, 2)
    known = DomainMemory(following, 1, 0, tmp_path).open_section(SECTION)[0]
    assert (known.epoch, known.out_step, known.retained) == (2, 2, ())


def test_a_block_that_is_made_in_an_epoch_belongs_to_it(tmp_path: Path) -> None:
    config = DomainConfig(JOB, 0, "calls", 5, (Member(1, "a", 1),), 0, 1, 1, 256, 65536, (0,))
    DomainMemory(config, 1, 0, tmp_path).open_section(SECTION)
    assert DomainMemory(config, 1, 0, tmp_path).open_section(SECTION)[0].epoch == 5


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_matrices_of_a_block_are_those_tensors_that_lie_in_it_whole(seed: int, whole: bool) -> None:
    draw = random.Random(seed)
    shapes = [tuple(draw.choice((0, 1, 3, 40, 300)) for _ in range(draw.randint(0, 3))) for _ in range(40)]
    section = Section(0, tuple(TensorSpec(f"t{i}", shape, 0) for i, shape in enumerate(shapes)), (7, 20))
    starts, at = [], 0
    for tensor in section.tensors:
        starts.append(at)
        at += tensor.elements
    for block in AddressSpace(3, 2, 256 << 10, whole).append(section):
        end = block.start + block.elements
        inside = [(t, a) for t, a in zip(section.tensors, starts, strict=True) if t.elements and a < end]
        inside = [(t, a) for t, a in inside if a + t.elements > block.start]
        assert tensors_inside(section, block) == [t for t, _ in inside]
        wanted = []
        for tensor, a in inside:
            n = min(a + tensor.elements, end) - max(a, block.start)
            matrix = n == tensor.elements and len(tensor.shape) > 1
            wanted.append((tensor.shape[0], n // tensor.shape[0]) if matrix else (n, 0))
        assert segment_shapes(section, block) == tuple(wanted)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("residual_at", 9 << 48, "residual_at"),
        ("owner_at", 1 << 48, "owner_at"),
        ("held", 1, "held back"),
        ("kept_at", (5 << 48, 0, 0), "no payload"),
        ("spec", b"\xff", "no text"),
    ],
)
def test_a_record_that_names_what_is_not_there_is_damaged(tmp_path: Path, field: str, value: object, said: str) -> None:
    _, memory = node(tmp_path)
    record = memory.blocks[0].record
    record["decision_step"], record["spec"] = 1, b"none"
    memory.heap.allocate(64)
    again = DomainMemory(memory.config, 1, 0, memory.directory)
    assert again.open_section(SECTION)[0].decision is not None
    record[field] = value
    with pytest.raises(MemoryDamaged, match=said):
        DomainMemory(memory.config, 1, 0, memory.directory).open_section(SECTION)


def test_a_retained_payload_longer_than_its_room_is_damaged(tmp_path: Path) -> None:
    _, memory = node(tmp_path)
    memory.make_kept(0, 0, 100)
    record = memory.blocks[0].record
    record["kept_step"][0, 0], record["kept_codec"][0, 0] = 1, 16
    for size, fits in ((100, True), (101, False)):
        record["kept_bytes"][0, 0] = size
        again = DomainMemory(memory.config, 1, 0, memory.directory)
        if fits:
            assert again.open_section(SECTION)[0].retained[0].nbytes == size
        else:
            with pytest.raises(MemoryDamaged, match="101 bytes"):
                again.open_section(SECTION)
