"""Levels of single segments through the executor, from a plan's rules to bytes, and again after a restart.

What may live here: what encoding and averaging do with levels, and what the ledger keeps of them. What may not: which
levels a plan gives (`core/test_plan.py`), rounds of two exchanges (`test_exchanges.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gcproto import slots
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import Rule
from gcproto.records import replace
from gcserver.core import tuning
from gcserver.core.effects import Accumulate, Decode, Encode, Finalise
from gcserver.core.events import Decision, DomainConfig, Member, Plan, Retained
from gcserver.core.plan import Choice, compiled, explain
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.executor import Executor
from gcserver.runtime.resolve import resolve

ID = (b"j" * 16, 0)
SECTION = Section(0, tuple(TensorSpec(name, (n,), 0) for name, n in (("w", 20_000), ("bias", 300), ("v", 9_000))))
N, BIAS = 29_300, slice(20_000, 20_300)


class Node:
    """One member of two, of whom 0 is the owner of the only block; its process can be lost."""

    def __init__(self, folder: Path, me: int) -> None:
        self.config = DomainConfig(ID[0], 0, "ddp", 1, (Member(1, "a", 1), Member(2, "b", 1)), me, 1, 2, 2, 0, (me,))
        self.folder = folder / str(me)
        self.restart()

    def restart(self) -> None:
        self.memory = DomainMemory(self.config, 1, 0, self.folder)
        self.known = self.memory.open_section(SECTION)
        self.executor = Executor()
        self.executor.domains[ID] = self.memory
        self.block = self.memory.blocks[0]

    def push(self, x: np.ndarray) -> None:
        self.block.floats(self.block.inputs[0])[:] = x
        slots.commit_push(self.block.arena, self.block.slot, 0, 1, 2, 1.0)

    def encode(self, choice: Choice, d: Decision, retain: int | None = None) -> tuple[bytes, int]:
        levels, grade = tuning.own(choice, d, 3)
        codec = replace(choice.codec, level=grade)
        done = self.executor.encode(Encode(ID, 0, d.step, codec, d.seed, 0, 1, retain, 2, 0, levels=levels))
        return bytes(self.executor.handles.table[done.handle or 0]), grade


def chosen(*rules: Rule) -> Choice:
    plan = Plan(1, tuple(compiled(r, resolve) for r in rules), resolve("none"))
    (block,) = AddressSpace(2, 1, 8 << 20).append(SECTION)
    return explain(plan, SECTION, block, 0, 2)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Node, Node]:
    return Node(tmp_path, 0), Node(tmp_path, 1)


def average(nodes: tuple[Node, Node], choice: Choice, decisions: list[Decision]) -> tuple[np.ndarray, int]:
    """(output that both hold, payload bytes of the sum) of a round in which each encodes as it decided."""
    a, b = nodes
    parts = [n.encode(choice, d) for n, d in zip(nodes, decisions, strict=True)]
    for i, (payload, grade) in enumerate(parts):
        handle = a.executor.handles.add(memoryview(payload))
        a.executor.accumulate(Accumulate(ID, 0, 1, i, handle, choice.codec.id, grade, i == 0, False))
    grade = max(g for _, g in parts)
    codec, levels = replace(choice.codec, level=grade), tuning.owners(choice, grade, 3)
    done = a.executor.finalise(Finalise(ID, 0, 1, codec, 9, 0, 1, 0, 2, False, 2, 0, 0, levels))
    payload = bytes(a.executor.handles.table[done.handle or 0])
    divisor = 2 if codec.sum_units else 1
    b.executor.decode(Decode(ID, 0, 1, b.executor.handles.add(memoryview(payload)), codec.id, grade, divisor, 2, False))
    assert bytes(a.block.output) == bytes(b.block.output)
    return a.block.floats(a.block.output).copy(), len(payload)


RATIOS = ["topk", "dgc", "sidco-e", "redsync", "gaussiank"]


@pytest.mark.parametrize("name", RATIOS)
def test_a_tuned_round_after_a_restart_gives_the_same_bytes(nodes: tuple[Node, Node], name: str) -> None:
    """Contributions at a notch and at a level; what the plan excludes comes out exactly."""
    spec = f"{name}(ratio=0.001)"
    choice = chosen(
        Rule("*", spec, levels=(200_000, 50_000)), Rule("v", spec, levels=(90_000, 1000)), Rule("bias", "none")
    )
    assert choice.levels == ((200_000, 1_000_000, 90_000), (50_000, 1_000_000, 1000)) and choice.codec.tunable
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, N)).astype(np.float32)
    decisions = [Decision(1, 1, 0, choice.codec.spec, 5, 0), Decision(1, 1, 0, choice.codec.spec, 6, -1, 300_000)]
    first = []
    for node, values, decision in zip(nodes, (x, y), decisions, strict=True):
        node.push(values)
        node.memory.log_decision(0, decision)
        first.append(node.encode(choice, decision))
        node.restart()
        assert node.known[0].decision == decision
        assert node.encode(choice, decision) == first[-1]
    assert [grade for _, grade in first] == [(200_000 * 20_000 + 300 * 10**6 + 90_000 * 9000) // N, 300_000]
    output, nbytes = average(nodes, choice, decisions)
    assert np.array_equal(output[BIAS], ((x + y) * np.float32(0.5))[BIAS])
    # The own level would have sent a hundredth of this; redsync sends fewer than asked for.
    assert 8 * 0.15 * N < nbytes < 8 * 0.7 * N, "the owner encodes at the highest of both"


@pytest.mark.parametrize("name", [*RATIOS, "randomk"])
def test_more_than_the_codecs_own_level_fits_where_payloads_are_retained(nodes: tuple[Node, Node], name: str) -> None:
    """Each larger payload finds room, and few of them need a new place."""
    choice = chosen(Rule("*", f"{name}(ratio=0.001)"))
    node = nodes[0]
    node.push(np.random.default_rng(3).standard_normal(N).astype(np.float32))
    places = set()
    for level in range(10_000, 900_000, 30_000):
        levels = (level, level, level)
        e = Encode(ID, 0, 1, replace(choice.codec, level=level), 5, 0, 1, 0, 2, 0, levels=levels)
        done = node.executor.encode(e)
        assert done.nbytes > 0 and not done.nonfinite
        places.add(int(node.block.record["kept_at"][0][0]))
    assert len(places) < 9
    node.restart()
    (kept,) = node.known[0].retained
    assert isinstance(kept, Retained) and kept.level == level


@pytest.mark.parametrize(
    ("spec", "levels", "expected"),
    [
        ("qsgd(bits=4)", (6, 2), ((6, 8, 4), (2, 8, 4))),
        ("natural(bits=8)", (9, 8), ((9, 9, 8), (8, 9, 8))),
        ("onebit", (), ()),
        ("threshold(value=0.5)", (), ()),
    ],
)
def test_what_other_codecs_can_say_of_an_excluded_segment(
    nodes: tuple[Node, Node], spec: str, levels: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    """Their highest bits, or nothing; and no controller tunes them."""
    choice = chosen(Rule("*", spec), Rule("w", spec, levels=levels), Rule("bias", "none"))
    assert choice.levels == expected and not choice.codec.tunable
    decision = Decision(1, 1, 0, choice.codec.spec, 5, *tuning.decided(choice, (0, 500)))
    for node in nodes:
        node.push(np.random.default_rng(4).standard_normal(N).astype(np.float32))
    output, _ = average(nodes, choice, [decision, decision])
    exact = nodes[0].block.floats(nodes[0].block.inputs[0])[BIAS]
    if expected:
        assert np.dot(output[BIAS], exact) > 0.9 * np.linalg.norm(output[BIAS]) * np.linalg.norm(exact)
    assert choice.grades == (choice.codec.level,) * len(expected)
