"""Tensors and blocks as operators see them.

What may live here: tests of `gcserver/runtime/tensors.py`. What may not: plans as operators see them
(`test_planstatus.py`).
"""

from __future__ import annotations

from dataclasses import replace as dc_replace

import pytest

from gcproto import messages
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.records import replace
from gcserver.admin.source import AdminError, TensorStatus
from gcserver.runtime.tensors import Facts, holders, in_force, tensors, with_facts
from tests.unit.core.control_machine import declared, said

KIB = 1024


def laid_out(*sizes: int) -> tuple[Section, AddressSpace]:
    """A section of fp32 tensors of so many KiB in blocks of 256 KiB."""
    section = Section(0, tuple(TensorSpec(f"t{i}", (n * KIB // 4,), 0) for i, n in enumerate(sizes)))
    space = AddressSpace(1, 1, 256 * KIB)
    space.append(section)
    return section, space


def test_a_plan_comes_into_force_after_the_warm_up() -> None:
    m, _ = declared(whole=False, rules="topk")
    (job,) = m.jobs.values()
    (domain,) = job.domains.values()
    domain.config = replace(domain.config, warmup=5)
    for settled, since, spec, origin in (
        (0, 1, "none", "warm-up"),
        (4, 1, "none", "warm-up"),
        (5, 0, "topk", "default"),
    ):
        domain.settled = settled
        first, plan = in_force(job, domain)
        assert (first, plan.rules[0].origin) == (since, origin)
        assert {t.codec for t in tensors(domain, plan, 1)} == {spec}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((256, 256), [0, 1]),
        ((100, 100, 100), [0, 0, 0]),
        ((100, 100, 120), [0, 0, 1]),
        ((1024,), [0]),
        ((200, 312, 4), [0, 1, 2]),
        ((256, 0, 256), [0, 1, 1]),
        ((256, 0), [0, 0]),
        ((0, 256), [0, 0]),
    ],
)
def test_the_block_that_holds_most_of_a_tensor(sizes: tuple[int, ...], expected: list[int]) -> None:
    section, space = laid_out(*sizes)
    assert holders(section, space.blocks[0]) == expected


def test_tensors_of_a_domain() -> None:
    m, _ = declared(whole=False, rules="topk")
    (job,) = m.jobs.values()
    (domain,) = job.domains.values()
    first, plan = in_force(job, domain)
    assert (first, plan.version) == (0, 0)
    found = tensors(domain, plan, 1)
    assert [(t.name, t.address, t.bytes_raw, t.codec, t.dtype) for t in found] == [
        ("b", 0, 1200, "topk", "float32"),
        ("w", 1200, 360_000, "topk", "float32"),
    ]


def test_a_section_of_nothing() -> None:
    m, _ = declared(whole=False, rules="topk")
    said(m, 1, messages.DeclareSection(0, Section(1, (TensorSpec("empty", (0,), 0),))))
    (job,) = m.jobs.values()
    (domain,) = job.domains.values()
    last = tensors(domain, in_force(job, domain)[1], 1)[-1]
    assert (last.name, last.codec, last.bytes_raw) == ("empty", "none", 0)


def test_facts_are_shared_by_bytes() -> None:
    _, space = laid_out(256, 256)
    facts = {0: Facts(1000, 4.0, 8.0), 256 * KIB: Facts(100, 12.0, 2.0)}
    t = TensorStatus("t", "d", "float32", (96 * KIB,), 128 * KIB, "topk", 384 * KIB)
    shared = with_facts(t, list(space.blocks[0]), facts)
    assert (shared.bytes_wire, round(shared.residual_norm**2, 9)) == (600, 14.0)
    assert round(shared.gradient_norm**2, 9) == 6.0


def test_facts_of_a_tensor_are_looked_for_where_it_lies() -> None:
    """A model has thousands of tensors and hundreds of blocks, and the daemon has heartbeats to send."""
    _, space = laid_out(*[64] * 4000)
    blocks = list(space.blocks[0])
    assert len(blocks) == 1000
    for i in (0, 1, 7, 3999):
        t = TensorStatus(f"t{i}", "d", "float32", (64 * KIB // 4,), i * 64 * KIB, "topk", 64 * KIB)
        here = blocks[i // 4]
        # What lies before and behind it has no size that anybody could ask for.
        others = [b if b is here else dc_replace(b, dtype=None) for b in blocks]  # type: ignore[arg-type]
        assert with_facts(t, others, {here.key: Facts(1000, 4.0, 1.0)}).bytes_wire == 250


def test_a_job_whose_codec_is_gone_cannot_be_shown() -> None:
    m, _ = declared(whole=False)
    (job,) = m.jobs.values()
    text = messages.PlanText(job.id, 1, 7, (messages.Rule("*", "zip"),))
    job.plans[1] = text
    (domain,) = job.domains.values()
    domain.switches.append((1, 1))
    with pytest.raises(AdminError, match="job 'train' cannot run here: unknown codec 'zip'"):
        in_force(job, domain)
