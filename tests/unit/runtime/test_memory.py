"""The formula for a job's memory against the files that a lane makes.

What may live here: tests of `gcserver/runtime/memory.py`. What may not: what is free (`test_room.py`), running jobs
(`tests/integration/test_memory.py`).
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcserver.codecs import parse
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.events import DomainConfig, Member, Plan, PlanRule
from gcserver.core.plan import explain
from gcserver.runtime import memory, records
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.ledger import Ledger
from gcserver.runtime.memory import Laid, Share, of_domain
from gcserver.runtime.memory_parts import PRIVATE, SHARED, total
from gcserver.runtime.resolve import resolve
from gcserver.runtime.states import matrix_use, state_use

SECTIONS = (
    Section(0, (TensorSpec("a", (300, 300), 0), TensorSpec("b", (70,), 0), TensorSpec("c", (1000, 700), 0)), (1,)),
    Section(1, (TensorSpec("d", (33,), 4),)),
    Section(2, (TensorSpec("e", (400_001,), 0),)),
)
SPECS = (
    "none", "fp16", "onebit", "topk(ratio=0.01)", "dgc(ratio=0.01)", "signum", "qsgd(bits=4)", "powersgd(rank=2)",
    "powersgd(rank=2,values=16)",
)  # fmt: skip


def laid(spec: str, scheme: str, members: int, lanes: int) -> tuple[list[Laid], bool]:
    """The sections above under one codec."""
    choice = resolve(spec)
    plan = Plan(0, (PlanRule("*", choice, scheme),), resolve("none"))
    space = AddressSpace(members, lanes, 1 << 20, choice.whole)
    out = []
    for section in SECTIONS:
        blocks = space.append(section)
        out.append(Laid(section, blocks, [explain(plan, section, b, 65536, members) for b in blocks]))
    return out, choice.whole


def use_everything(lane: DomainMemory, made: list[Laid], me: int, order: random.Random) -> None:
    """Take all that blocks come to need: states at both ends, retained payloads; in any order."""
    todo = [(b, c, what) for x in made for b, c in zip(x.blocks, x.choices, strict=True) for what in range(3)]
    order.shuffle(todo)
    for block, choice, what in todo:
        state = lane.blocks.get(block.key)
        if state is None:
            continue
        codec, two = parse(choice.codec.spec), choice.codec.rounds > 1
        owned = block.owner == me
        if what == 0 and choice.codec.feedback:
            assert isinstance(codec, TwoRounds) == two
            use = matrix_use(codec, state) if isinstance(codec, TwoRounds) else state_use(codec, state)
            assert use is not None
            lane.state(block.key, 0, False, use)
        elif what == 1 and choice.codec.owner_feedback and owned:
            use = state_use(codec.at_owner(), state)
            assert use is not None
            lane.state(block.key, 0, True, use)
        elif what == 2 and (choice.scheme == "all" or (owned and choice.codec.id)):
            for slot in (0, 1):
                size = codec.needed(state.bounds, None) if choice.codec.id and not two else block.nbytes
                if isinstance(codec, TwoRounds):
                    size = max(codec.payload_bytes(slot, state.shapes), 4)
                lane.make_kept(block.key, slot, size)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("scheme", "members", "lanes", "ranks"), [("owner", 1, 1, 1), ("owner", 3, 2, 2), ("all", 2, 1, 1)]
)
def test_files_are_as_large_as_the_formula_says(
    spec: str, scheme: str, members: int, lanes: int, ranks: int, tmp_path: Path
) -> None:
    made, whole = laid(spec, scheme, members, lanes)
    nodes = tuple(Member(i + 1, "abc"[i], ranks) for i in range(members))
    for me in range(members):
        config = DomainConfig(
            b"j" * 16, 0, "ddp", 1, nodes, me, ranks, ranks * members, 2, 65536, tuple(range(ranks)), 1 << 20, whole
        )
        folder = tmp_path / str(me)
        for number in range(lanes):
            lane = DomainMemory(config, lanes, number, folder)
            for section in SECTIONS:
                lane.open_section(section)
            use_everything(lane, made, me, random.Random(me))
        Ledger(folder / "00000000.ledger")
        parts = of_domain(made, Share(members, me, ranks), lanes)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        heaps = sum(size for name, size in sizes.items() if ".heap" in name)
        exact = sum(p.nbytes for p in parts if p.exact)
        inside = sum(p.nbytes for p in parts if p.kind == SHARED and not p.exact and "left over" not in p.what)
        assert sum(sizes.values()) - heaps == exact, "arena, records, steps, ledger: to the byte"
        assert inside <= heaps <= total(parts, SHARED) - exact
        assert inside == 0 or heaps < 1.34 * inside + (len(sizes) << 12) + lanes * (1 << 20)
        assert all(p.nbytes >= 0 for p in parts)


@pytest.mark.parametrize("seed", range(8))
def test_a_heap_never_takes_more_than_is_counted(seed: int, tmp_path: Path) -> None:
    from gcserver.runtime.statefiles import Heap

    order = random.Random(seed)
    sizes = [int(2 ** order.uniform(4, 21)) for _ in range(40)]
    heap = Heap(tmp_path, "x")
    places = [heap.allocate(size) for size in sizes]
    for (chunk, at), size in zip(places, sizes, strict=True):
        heap.view((chunk, at), size)[:] = bytes([1]) * size
    assert sum(np.frombuffer(c.view, np.uint8).sum(dtype=np.int64) for c in heap.chunks) == sum(sizes), "apart"
    assert sum(sizes) <= heap.nbytes <= memory.heap_bytes(sizes)


def test_what_a_model_needs_grows_as_the_formula_in_the_docs() -> None:
    """4 N of gradients a rank and 4 N of averages; 8 N of states, and 8 N / n of the blocks a node owns."""
    n = 10_000_000
    for members, ranks in ((1, 1), (2, 1), (4, 3)):
        found = of_domain(memory.a_model(n, "onebit", members, 1, 8 << 20, 65536), Share(members, 0, ranks), 1)
        parts = {p.what.split(",")[0].split(" of ")[0]: p.nbytes for p in found}
        assert parts["gradients"] == 4 * n * ranks and parts["averages"] == 4 * n
        states = [p for p in found if "codec states" in p.what]
        assert states[0].nbytes == pytest.approx(8 * n, rel=1e-3)
        assert states[1].nbytes == pytest.approx(8 * n / members, rel=0.2)


def test_the_docs_say_what_a_block_is_noted_in() -> None:
    assert f"B x {records.RECORD.itemsize} bytes" in (Path(__file__).parents[3] / "docs" / "memory.md").read_text()


def test_parking_is_bounded_by_credit_and_by_what_there_is() -> None:
    def parked(parameters: int, members: int) -> int:
        made = memory.a_model(parameters, "none", members, 1, 8 << 20, 65536)
        (part,) = [p for p in of_domain(made, Share(members, 0, 1), 1) if "wait for their turn" in p.what]
        return part.nbytes

    assert parked(1 << 28, 5) == 4 * (32 << 20)
    assert parked(1000, 5) == 4 * 4000
    assert parked(1 << 28, 1) == 0


def test_a_daemon_takes_something_without_a_job() -> None:
    parts = memory.of_daemon(3)
    assert total(parts, SHARED) == 0 and total(parts, PRIVATE) == 3 * memory.LANE_BYTES + memory.SUPERVISOR_BYTES
