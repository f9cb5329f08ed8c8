"""What a lane's files remember of a block.

What may live here: tests of `gcserver/runtime/blocks.py`. What may not: states of codecs (`test_states.py`).
"""

from __future__ import annotations

from pathlib import Path

from gcproto import slots
from gcproto.wire import Flag
from gcserver.core.events import DomainConfig, Member
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
