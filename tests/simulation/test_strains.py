"""What ends a job ends it by a fault of the right kind on every node; what is harmless changes nothing.

What may live here: one world for each strain. What may not: mixes of them, which seeds play.
"""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from gcproto.agreed import Resumed, Rule
from gcproto.messages import Fault
from tests.simulation import bounds, latecomers, mistakes, modes, remembered, strains, strangers
from tests.simulation.faults import lose_memory
from tests.simulation.processes import CONTROL
from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.shape import KIB, Shape, draw, section
from tests.simulation.world import World

#: kinds of the fault by which each ends its job
ENDS = {
    mistakes.other_tensors: {"TensorMismatch"},
    mistakes.other_group: {"TensorMismatch"},
    mistakes.leaves_out: {"TensorMismatch"},
    mistakes.other_operation: {"TensorMismatch"},
    mistakes.ends_early: {"WorkerLost"},
    mistakes.new_tensor: {"TensorMismatch"},
    mistakes.odd_domain: {"TensorMismatch", "CodecError"},
    mistakes.odd_section: {"TensorMismatch"},
    mistakes.odd_doorbell: {"TensorMismatch"},
    mistakes.hangs: {"StepTimeout"},
    mistakes.does_not_return: {"WorkerLost"},
    mistakes.empty_memory: {"PeerLost"},
    mistakes.downgrade: {"CodecError"},
    strangers.other_release: {"CorruptFrame", "TensorMismatch"},
    strangers.undecodable: {"CorruptFrame"},
    strangers.odd_offer: {"TensorMismatch"},
    remembered.spoiled: {"PeerLost"},
    bounds.born_ahead: {"PeerLost"},
    latecomers.no_space: {"OutOfMemory"},
    latecomers.declares_nothing: {"StepTimeout"},
    latecomers.dies_while_busy: {"WorkerLost"},
    lose_memory: {"PeerLost"},
    strains.expel: {"PeerLost"},
}


def world(steps: int, resumed: Resumed | None = None) -> World:
    """Three nodes of one and two ranks that train one model of four blocks."""
    ranks = tuple(range(4))
    tensors = section(0, 0, [256 * KIB, 128 * KIB])
    domain = DomainSpec(
        0, ranks, True, "feedback", (tensors,), (1,), steps, {}, frozenset(), 1, seed=3, resumed=resumed
    )
    job = JobSpec("train", ((0, 1), (1, 2), (2, 1)), (domain,))
    return World(Shape(3, 1, (job,), partition_bytes=128 * KIB), seed=2)


def play(w: World, strain: strains.Strain, at: float) -> None:
    w.start()
    while w.now < at:
        w.step()
    strain(w, Random(1))
    w.run()


@pytest.mark.parametrize("strain", ENDS, ids=lambda s: s.__name__)
def test_what_ends_a_job_says_why_to_every_worker(strain: strains.Strain) -> None:
    """G5, G6."""
    w = world(60)
    play(w, strain, 0.0 if strain in strains.AT_START else 0.4)
    assert w.fatal
    told = [x for x in w.workers if not x.killed and not x.ended_by_launcher]
    assert len(told) >= 2
    for worker in told:
        # Who had made all its steps and left in good order has no fault.
        assert worker.fault is not None or all(t.finished for t in worker.threads.values())
    faults = {x.fault.kind for x in told if isinstance(x.fault, Fault)}
    assert faults and faults <= ENDS[strain]


def test_a_plan_that_was_saved_is_not_replaced_where_its_codec_is_missing() -> None:
    """G6."""
    w = world(12, Resumed(b"an earlier job's", 46, (), (Rule("*", "coarse"),), ""))
    play(w, mistakes.lacks_a_codec, 0.0)
    assert w.fatal
    faults = [x.fault for x in w.workers]
    assert {f.kind for f in faults if isinstance(f, Fault)} == {"CodecError"}
    assert all("no codec 'coarse' in this release" in str(f) for f in faults)


def test_every_deadly_strain_is_expected_to_end_a_job() -> None:
    assert {*strains.DEADLY, *strains.RARE_DEADLY} <= set(ENDS)


@pytest.mark.parametrize("strain", [*{**strains.HARMLESS, **strains.RARE}, *modes.HARMLESS], ids=lambda s: s.__name__)
def test_what_is_harmless_changes_no_output(strain: strains.Strain) -> None:
    w = world(12)
    play(w, strain, 0.2)
    assert not w.fatal
    assert w.steps_done == 4 * 12


def test_clocks_of_their_own_change_no_output() -> None:
    w = world(12)
    strains.skew(w)
    assert len({n.clock() for n in w.nodes}) > 1
    play(w, lambda w, r: None, 0.0)
    assert w.steps_done == 4 * 12


@pytest.mark.parametrize("lane", [0, CONTROL])
def test_links_that_stand_still_in_both_directions_go_on_and_change_no_output(lane: int) -> None:
    """Without the deadline of the job or the lease of a node being reached."""
    w = world(12)

    def everywhere(w: World, r: Random) -> None:
        for a, b in permutations((n.name for n in w.nodes), 2):
            w.network.stall(a, b, lane)

    play(w, everywhere, 0.2)
    assert not w.fatal
    assert w.steps_done == 4 * 12
    assert w.counts["connections_stalled"] >= 6 and w.now < 60.0


def test_worlds_are_of_all_sizes_and_types() -> None:
    shapes = [draw(seed) for seed in range(3000)]
    assert {s.nodes for s in shapes} >= {1, 2, 3, 4, 5, 6, 8, 12, 16, 24}
    assert max(s.nodes for s in shapes) > 24
    assert max(len(s.jobs) for s in shapes) == 2
    # One in a hundred is large: what they cost grows with the square of their nodes.
    assert sum(s.nodes > 6 for s in shapes) < 0.03 * len(shapes)
    types = {sec.dtype for s in shapes for j in s.jobs for d in j.domains for sec in d.sections}
    assert len(types) == 3
