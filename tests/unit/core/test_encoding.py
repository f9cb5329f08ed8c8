"""What this node decides before it encodes.

What may live here: tests of `gcserver/core/encoding.py`. What may not: codecs.
"""

from __future__ import annotations

from gcproto.manifest import AddressSpace
from gcproto.records import replace
from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.unit.core.lane_machine import DENSE, JOB, SECTION, A, B, machine


def encoded_seed(job: bytes, seed: int | None, me: int = 0, codec: ev.CodecChoice = DENSE) -> int:
    """What the first contribution of a job's first block draws from, on member a (0) or b."""
    m = machine()
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(job, 0, "ddp", 1, members, me, 1, 2, 2, 0, seed=seed)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), codec),)), 0.0)
    m.on(ev.SectionOpened((job, 0), SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    out = m.on(ev.Pushed((job, 0), 0, 1, (0,), False), 0.0)
    (encode,) = (e for e in out if isinstance(e, fx.Encode))
    return encode.seed


def encoded_with(step: int, warmup: int) -> str:
    """The codec of the first block in a step of a domain with a warm-up, under a plan that compresses everything."""
    m = machine()
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0, warmup=warmup)
    topk = ev.CodecChoice("topk", 2, 16, True, True)
    plan = ev.Plan(0, (ev.PlanRule("*", topk),), DENSE)
    m.on(ev.DomainOpened(config, (plan,), step - 1), 0.0)
    m.on(ev.SectionOpened((JOB, 0), SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    out = m.on(ev.Pushed((JOB, 0), 0, step, (0,), False), 0.0)
    (encode,) = (e for e in out if isinstance(e, fx.Encode))
    (logged,) = (e for e in out if isinstance(e, fx.LogDecision))
    assert logged.decision.spec == encode.codec.spec
    return encode.codec.spec


def test_steps_of_the_warm_up_are_dense() -> None:
    assert [encoded_with(step, 2) for step in (1, 2, 3, 4)] == ["none", "none", "topk", "topk"]
    assert encoded_with(1, 0) == "topk"


def test_a_seed_makes_two_jobs_draw_alike() -> None:
    other = b"k" * 16
    assert encoded_seed(JOB, 5) == encoded_seed(other, 5) != encoded_seed(JOB, 6)
    assert encoded_seed(JOB, None) == encoded_seed(JOB, None) != encoded_seed(other, None)


def test_nodes_draw_by_themselves_unless_their_codec_says_otherwise() -> None:
    assert encoded_seed(JOB, 5, 0) != encoded_seed(JOB, 5, 1)
    alike = replace(DENSE, shared_seed=True)
    assert encoded_seed(JOB, 5, 0, alike) == encoded_seed(JOB, 5, 1, alike)
