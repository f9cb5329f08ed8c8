"""Rules: one for one option, stars for numbers, names with glob characters, and the way back to options of blocks."""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec
import pytest

from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import Rule
from gcproto.patterns import last_of_each
from gcserver.core import plan as core
from gcserver.core.events import Plan
from gcserver.planner.auto_rules import PlannedRule, TensorOption, applied, rules
from gcserver.planner.live import ALL, OWNER, BlockOption, Live
from gcserver.runtime.resolve import resolve
from tests.unit.planner.live_profiles import gpt

NAMES = [f"h.{i}.{part}" for i in range(12) for part in ("ln.weight", "fc.weight")]


def holds(found: tuple[PlannedRule, ...], name: str) -> TensorOption:
    rule = next(r for r in reversed(found) if fnmatchcase(name, r.pattern))
    return TensorOption(rule.spec, rule.scheme, rule.levels)


def test_one_option_is_one_rule() -> None:
    option = TensorOption("topk(ratio=0.01)", ALL)
    assert rules(NAMES, dict.fromkeys(NAMES, option)) == (PlannedRule("*", "topk(ratio=0.01)", ALL),)
    assert rules(NAMES, {}) == (PlannedRule("*", "none"),)
    # what is not wanted by a name does not cost a rule
    assert len(rules(NAMES, dict.fromkeys(NAMES[:3], option))) == 1


def test_numbers_become_stars_where_all_of_them_want_the_same() -> None:
    wanted = {n: TensorOption("none" if "ln" in n else "topk(ratio=0.01)") for n in NAMES}
    wanted["h.3.fc.weight"] = TensorOption("topk(ratio=0.01)", ALL)
    found = rules(NAMES, wanted)
    assert len(found) == 3
    assert [r.pattern for r in found] == ["*", "h.*.fc.weight", "h.3.fc.weight"]
    assert all(holds(found, n) == wanted[n] for n in NAMES)


def test_every_name_gets_what_it_wants_whatever_it_is_called() -> None:
    names = ["a[0]", "a[1]", "a0", "a1", "b*", "bx", "c?1", "c?2", "cx1", "10", "11"]
    wanted = {n: TensorOption(f"topk(ratio={(i % 3 + 1) / 100})", OWNER, (i % 2,)) for i, n in enumerate(names)}
    found = rules(names, wanted)
    assert all(holds(found, n) == wanted[n] for n in names)
    assert any(r.pattern.startswith("a[[]") for r in found[1:])


@pytest.mark.parametrize(
    ("exactly", "wanted"),
    [
        (("h.*.fc.weight",), {}),
        (("h.3.fc.weight", "h.3.fc.weight"), {}),
        (("h.3.fc.weight",), {"h.3.fc.weight": TensorOption("none", ALL)}),
    ],
)
def test_no_pattern_comes_twice_so_that_a_planner_knows_its_plan(
    exactly: tuple[str, ...], wanted: dict[str, TensorOption]
) -> None:
    """Of two rules for one pattern members keep the later one: the plan in force would not be what was asked."""
    every = {n: TensorOption("none" if "fc" in n else "topk(ratio=0.01)") for n in NAMES} | wanted
    found = rules(NAMES, every, exactly)
    asked = tuple(Rule(*msgspec.structs.astuple(rule)) for rule in found)
    assert last_of_each(asked) == asked
    assert all(holds(found, n) == every[n] for n in NAMES)


def test_a_rule_has_the_fields_of_the_message() -> None:
    rule = PlannedRule("*", "qsgd(bits=4)", ALL, (8, 4))
    assert Rule(*msgspec.structs.astuple(rule)) == Rule("*", "qsgd(bits=4)", ALL, (8, 4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule).levels == (8, 4)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("plan", [
    (),
    (PlannedRule("*", "sidco-e(ratio=0.01)", ALL),),
    (PlannedRule("*", "qsgd(bits=8)"), PlannedRule("h.1.*", "none"), PlannedRule("wte*", "fp16", ALL)),
    (PlannedRule("*", "powersgd(rank=4)", ALL), PlannedRule("h.0.attn*", "topk(ratio=0.05)", ALL)),
])  # fmt: skip
def test_rules_come_to_what_the_daemon_makes_of_them(plan: tuple[PlannedRule, ...], whole: bool) -> None:
    profile = gpt(4, whole=whole)
    live = Live(profile)
    options = [live.settled(b, option) for b, option in enumerate(applied(live, plan))]
    space = AddressSpace(4, 1, profile.partition_bytes, whole)
    section = Section(0, tuple(TensorSpec(t.name, t.shape, int(DType.F32)) for t in profile.tensors))
    blocks = space.append(section)
    compiled = tuple(core.compiled(Rule(*msgspec.structs.astuple(r)), resolve) for r in plan)
    theirs = Plan(1, compiled, resolve("none"))
    for option, block in zip(options, blocks, strict=True):
        choice = core.explain(theirs, section, block, profile.min_compress_bytes, 4)
        assert (resolve(option.spec), option.scheme) == (choice.codec, choice.scheme)


def test_levels_are_those_of_each_tensors_own_rule() -> None:
    live = Live(gpt(2))
    plan = [
        PlannedRule("*", "sidco-e(ratio=0.01)", OWNER, (20_000, 10_000)),
        PlannedRule("*.bias", "topk(ratio=0.01)", OWNER, (1_000_000, 1_000_000)),
    ]
    tensors = live.profile.tensors
    for notch, ratio in ((0, 20_000), (-1, 10_000)):
        for block, option in zip(live.blocks, applied(live, plan, notch), strict=True):
            wanted = 0.0
            for t, n in block.parts:
                level = 1_000_000 if tensors[t].name.endswith("bias") else ratio
                wanted += 4 + 8 * max(1, n * level // 1_000_000)
            assert option == BlockOption("sidco-e(ratio=0.01)", OWNER, wanted)
    bits = [PlannedRule("*", "qsgd(bits=4)"), PlannedRule("*.bias", "topk(ratio=0.01)", OWNER, (10_000,))]
    # a rule for another codec: sent at the most bits there are
    for block, option in zip(live.blocks, applied(live, bits), strict=True):
        level = {t: 8 if tensors[t].name.endswith("bias") else 4 for t, _ in block.parts}
        assert option.nbytes == sum(8 + 8 * -(-n // 1024) + -(-n * level[t] // 8) for t, n in block.parts)


def test_names_that_are_numbers_take_no_rule_from_all_others() -> None:
    """A star for every number of such a name would be the pattern of all."""
    dense, sparse = TensorOption(), TensorOption("topk(ratio=0.01)")
    wanted = {"0": sparse, "1": sparse, "a.w": dense, "b.w": dense, "c.w": dense}
    found = rules(list(wanted), wanted)
    assert [r.pattern for r in found] == ["*", "0", "1"] and [r.spec for r in found[1:]] == [sparse.spec] * 2
