"""What a lane's files remember of a block.

What may live here: tests of `gcserver/runtime/blocks.py`. What may not: states of codecs (`test_states.py`).
"""

from __future__ import annotations

from pathlib import Path

from gcproto import slots
from gcproto.records import replace
from gcproto.wire import Flag
from gcserver.core.events import DomainConfig, Member, Retained, StepRecord
from gcserver.runtime.blocks import DomainMemory
from tests.unit.runtime.one_block import JOB, SECTION


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
