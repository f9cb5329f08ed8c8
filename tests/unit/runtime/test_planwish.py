"""What is asked of the planner for a domain: how its worker brings gradients."""

from __future__ import annotations

import pytest

from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.records import replace
from gcserver.core.control_domain import ControlDomain
from gcserver.planner.live_layout import DDP_BUCKETS
from gcserver.runtime import planwish
from tests.unit.core.control_machine import declared


def domain(label: str, *sections: Section) -> ControlDomain:
    (job,) = declared(whole=False)[0].jobs.values()
    (found,) = job.domains.values()
    found.config = replace(found.config, label=label)
    found.sections = list(sections)
    return found


def section(index: int, names: str, *cuts: int) -> Section:
    return Section(index, tuple(TensorSpec(name, (8,), int(DType.F32)) for name in names), cuts)


@pytest.mark.parametrize(
    ("label", "cuts", "buckets", "groups"),
    [
        ("ddp.0", (), DDP_BUCKETS, ()),
        ("optimizer.0", (), (), ()),
        ("optimizer.0", (1, 3), (), (("a",), ("b", "c"), ("d",), ("x",))),
    ],
)
def test_how_gradients_are_brought(
    label: str, cuts: tuple[int, ...], buckets: tuple[int, ...], groups: tuple[tuple[str, ...], ...]
) -> None:
    found = domain(label, section(0, "abcd", *cuts), section(1, "x"))
    assert (planwish.buckets(found), planwish.groups(found)) == (buckets, groups)
