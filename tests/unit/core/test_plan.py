"""Which codec a block gets: the last matching rule, and what is never compressed.

What may live here: tests of `gcserver/core/plan.py`. What may not: when a plan takes effect.
"""

from __future__ import annotations

import msgspec
import pytest

from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import Rule
from gcserver.core.events import CodecChoice, Plan, PlanRule
from gcserver.core.plan import MAX_GLOBS, PlanError, compiled, cut_matrix, explain, unusable

DENSE = CodecChoice("none", 1, 0, False, False)
CAST = CodecChoice("fp16", 2, 0, False, False)
TOPK = CodecChoice("topk(ratio=0.01)", 4, 1, True, True)
MATRIX = CodecChoice("powersgd(rank=4)", 64, 4, True, True, whole=True)


def pick(plan: Plan, name: str, elements: int = 100_000, dtype: DType = DType.F32, members: int = 2) -> tuple[str, str]:
    section = Section(0, (TensorSpec(name, (elements,), int(dtype)),))
    (block, *_) = AddressSpace(2, 1, 4 << 20).append(section)
    choice = explain(plan, section, block, 64 << 10, members)
    return choice.codec.spec, choice.scheme


def test_the_last_match_wins() -> None:
    plan = Plan(1, (PlanRule("*", CAST), PlanRule("layer.*", TOPK, "all"), PlanRule("*.bias", DENSE)), DENSE)
    assert pick(plan, "embed") == ("fp16", "owner")
    assert pick(plan, "layer.0.weight") == ("topk(ratio=0.01)", "all")
    assert pick(plan, "layer.0.bias") == ("none", "owner")


def test_without_a_rule_it_is_dense() -> None:
    assert pick(Plan(0, (), DENSE), "w") == ("none", "owner")
    assert pick(Plan(0, (PlanRule("v*", TOPK),), DENSE), "w") == ("none", "owner")


def test_small_sections_go_dense() -> None:
    plan = Plan(0, (PlanRule("*", TOPK),), DENSE)
    assert pick(plan, "w", elements=16 * 1024) == ("topk(ratio=0.01)", "owner")
    assert pick(plan, "w", elements=16 * 1024 - 1) == ("none", "owner")


@pytest.mark.parametrize(
    ("dtype", "topk", "cast"),
    [(DType.F32, True, True), (DType.F16, True, False), (DType.BF16, True, False), (DType.F64, False, False),
     (DType.I32, False, False), (DType.U8, False, False), (DType.BOOL, False, False)],
)  # fmt: skip
def test_what_can_be_compressed(dtype: DType, topk: bool, cast: bool) -> None:
    for codec, applies in ((TOPK, topk), (CAST, cast)):
        spec, _ = pick(Plan(0, (PlanRule("*", codec),), DENSE), "w", 10**6, dtype)
        assert (spec == codec.spec) is applies


def test_a_block_is_named_after_the_tensor_that_fills_most_of_it() -> None:
    section = Section(0, (TensorSpec("small", (1000,), 0), TensorSpec("large", (50_000,), 0)))
    (block,) = AddressSpace(1, 1, 4 << 20).append(section)
    plan = Plan(0, (PlanRule("large", TOPK),), DENSE)
    assert explain(plan, section, block, 0, 2).codec is TOPK


def test_tiny_dense_blocks_go_to_everyone_at_once() -> None:
    plan = Plan(0, (PlanRule("*", TOPK),), DENSE)
    assert pick(plan, "w", elements=1024) == ("none", "all")
    assert pick(Plan(0, (), DENSE), "w", elements=8 * 1024) == ("none", "all")
    assert pick(plan, "w", elements=8 * 1024 + 1) == ("none", "owner")
    # every member sends its bytes to all others
    assert pick(plan, "w", elements=1024, members=8) == ("none", "all")
    assert pick(plan, "w", elements=1200, members=8) == ("none", "owner")
    assert pick(plan, "w", elements=1, members=9) == ("none", "owner")


def test_what_votes_needs_an_owner() -> None:
    vote = CodecChoice("signsgd", 33, 0, False, False, False, True)
    assert pick(Plan(0, (PlanRule("*", vote, "all"),), DENSE), "w") == ("signsgd", "owner")


@pytest.mark.parametrize("whole", [False, True])
def test_what_takes_whole_matrices_goes_dense_where_they_may_be_cut(whole: bool) -> None:
    section = Section(0, (TensorSpec("w", (300, 300), 0),))
    (block, *_) = AddressSpace(2, 1, 4 << 20, whole).append(section)
    plan = Plan(0, (PlanRule("*", MATRIX),), DENSE)
    assert explain(plan, section, block, 0, 2).codec is (MATRIX if whole else DENSE)


def test_the_first_matrix_that_would_be_cut_is_named() -> None:
    section = Section(0, (TensorSpec("a", (30,), 0), TensorSpec("b", (300, 300), 0), TensorSpec("c", (300, 300), 0)))
    rules = (PlanRule("*", TOPK), PlanRule("[bc]", MATRIX))
    assert cut_matrix(Plan(0, rules, DENSE), section, 0) == ("b", MATRIX)
    assert cut_matrix(Plan(0, (*rules, PlanRule("b", DENSE)), DENSE), section, 0) == ("c", MATRIX)
    assert cut_matrix(Plan(0, (*rules, PlanRule("*", DENSE)), DENSE), section, 0) is None
    assert cut_matrix(Plan(0, rules, DENSE), section, 1 << 20) is None, "too small to be compressed"
    assert cut_matrix(Plan(0, rules, DENSE), section, 0, planned=True) is None
    mixed = (PlanRule("*", MATRIX, origin="default"), PlanRule("b", MATRIX))
    assert cut_matrix(Plan(0, mixed, DENSE), section, 0, planned=True) == ("a", MATRIX)
    doubles = Section(0, (TensorSpec("b", (300, 300), int(DType.F64)),))
    assert cut_matrix(Plan(0, rules, DENSE), doubles, 0) is None


def test_each_group_is_compressed_for_itself() -> None:
    """A group under min_compress_bytes goes dense whatever is declared with it."""
    tensors = tuple(TensorSpec(name, (n,), 0) for name, n in (("a", 8000), ("b", 8000), ("c", 300), ("d", 20_000)))
    plan = Plan(1, (PlanRule("*", TOPK),), DENSE)
    for cuts, expected in (((), ["topk"]), ((2, 3), ["none", "none", "topk"]), ((1,), ["none", "topk"])):
        section = Section(0, tensors, cuts)
        blocks = AddressSpace(1, 1, 4 << 20).append(section)
        assert [explain(plan, section, b, 64 << 10, 2).codec.spec.split("(")[0] for b in blocks] == expected


def test_a_matrix_in_a_group_too_small_to_compress_is_cut_by_nobody() -> None:
    tensors = (TensorSpec("small", (30, 30), 0), TensorSpec("large", (300, 300), 0))
    plan = Plan(1, (PlanRule("small", MATRIX),), DENSE)
    assert cut_matrix(plan, Section(0, tensors), 64 << 10) == ("small", MATRIX)
    assert cut_matrix(plan, Section(0, tensors, (1,)), 64 << 10) is None


def test_two_exchanges_go_through_an_owner() -> None:
    twice = CodecChoice("powersgd(rank=4)", 64, 4, True, True, rounds=2)
    assert pick(Plan(0, (PlanRule("*", twice, "all"),), DENSE), "w") == ("powersgd(rank=4)", "owner")


VOTE = CodecChoice("signsgd", 33, 0, False, False, votes=True)
TWICE = CodecChoice("powersgd(rank=4)", 64, 4, True, True, rounds=2)


def why(rule: PlanRule, elements: int, dtype: DType = DType.F32, members: int = 2) -> tuple[str, str, str]:
    """(codec, scheme, reason) under one rule for all."""
    section = Section(0, (TensorSpec("w", (elements,), int(dtype)),))
    (block, *_) = AddressSpace(2, 1, 4 << 20).append(section)
    plan = Plan(1, (rule,), DENSE)
    choice = explain(plan, section, block, 64 << 10, members)
    assert choice.rule == rule
    return choice.codec.spec, choice.scheme, choice.reason


@pytest.mark.parametrize(
    ("rule", "elements", "dtype", "expected"),
    [
        (PlanRule("*", TOPK), 10**6, DType.F32, ("topk(ratio=0.01)", "owner", "")),
        (PlanRule("*", TOPK, "all"), 10**6, DType.F32, ("topk(ratio=0.01)", "all", "")),
        (PlanRule("*", DENSE, "all"), 10**6, DType.I32, ("none", "all", "")),
        (PlanRule("*", TOPK, "all"), 10**4, DType.F32, ("none", "all", "below min_compress_bytes")),
        (PlanRule("*", TOPK), 100, DType.F32, ("none", "all", "below min_compress_bytes; small: to everyone at once")),
        (PlanRule("*", DENSE), 100, DType.F32, ("none", "all", "small: to everyone at once")),
        (PlanRule("*", TOPK), 10**6, DType.I64, ("none", "owner", "integers travel as they are")),
        (PlanRule("*", TOPK), 10**6, DType.F64, ("none", "owner", "float64 travels as it is")),
        (PlanRule("*", CAST), 10**6, DType.BF16, ("none", "owner", "a cast would not shrink bfloat16")),
        (PlanRule("*", MATRIX), 10**6, DType.F32, ("none", "owner", "matrices may be cut: dense")),
        (PlanRule("*", VOTE, "all"), 10**6, DType.F32, ("signsgd", "owner", "votes need an owner")),
        (PlanRule("*", VOTE), 10**6, DType.F32, ("signsgd", "owner", "")),
        (PlanRule("*", TWICE, "all"), 10**6, DType.F32, ("powersgd(rank=4)", "owner", "two exchanges need an owner")),
    ],
)
def test_where_a_rule_is_not_followed_the_reason_is_given(
    rule: PlanRule, elements: int, dtype: DType, expected: tuple[str, str, str]
) -> None:
    assert why(rule, elements, dtype) == expected


def test_without_a_rule_the_explanation_says_so() -> None:
    section = Section(0, (TensorSpec("w", (10**6,), 0),))
    (block, *_) = AddressSpace(2, 1, 4 << 20).append(section)
    choice = explain(Plan(0, (PlanRule("v*", TOPK),), DENSE), section, block, 0, 2)
    assert (choice.codec, choice.scheme, choice.rule, choice.reason) == (DENSE, "owner", None, "no rule matches")


def test_a_lanes_copy_of_a_plan_gives_the_same() -> None:
    """Lanes have plans from a message: what is equal there is not the same object."""
    plan = Plan(1, (PlanRule("*", DENSE),), DENSE)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert pick(copy, "w", elements=100) == pick(plan, "w", elements=100) == ("none", "all")


def resolve(spec: str) -> CodecChoice:
    if spec != "none":
        raise ValueError(f"unknown codec {spec!r}")
    return DENSE


def test_rules_become_rules_of_a_plan() -> None:
    assert compiled(Rule("w*", "none"), resolve) == PlanRule("w*", DENSE, "owner", "plan")
    assert compiled(Rule("w*", "none", "owner"), resolve, "default") == PlanRule("w*", DENSE, "owner", "default")
    assert compiled(Rule("w*", "none", "all"), resolve).scheme == "all"
    with pytest.raises(PlanError, match=r"expected one of owner, all, or nothing for the owner; got 'ring'"):
        compiled(Rule("w*", "none", "ring"), resolve)


def test_the_first_rule_that_cannot_be_run_is_named() -> None:
    good = Rule("*", "none")
    assert unusable((good, good), resolve) is None
    assert unusable((good, Rule("v", "zip"), Rule("w", "rar")), resolve) == (1, "rule 'v': unknown codec 'zip'")


def graded(spec: str, id: int, own: int, exact: int = 1_000_000, tunable: bool = True, high: int = 0) -> CodecChoice:
    """A codec whose segments may have levels of their own."""
    choice = CodecChoice(spec, id, own, True, True, levels=(1, high or exact), own=own, exact=exact)
    return choice if not tunable else msgspec.structs.replace(choice, tunable=True)


ONE, TEN = graded("topk(ratio=0.01)", 16, 10_000), graded("topk(ratio=0.1)", 16, 100_000)
OTHER, LOW_RANK = graded("dgc(ratio=0.1)", 18, 100_000), graded("powersgd(rank=4)", 64, 4, 65, False, 4)
HIGH_RANK = graded("powersgd(rank=8)", 64, 8, 65, False, 8)
LAYERS = Section(
    0, tuple(TensorSpec(name, (n,), 0) for name, n in (("a", 6000), ("bias", 0), ("b", 3000), ("c", 1000)))
)


def levels(*rules: PlanRule) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(levels of a, b and c at each notch, what frames say); the block's codec is a's."""
    (block,) = AddressSpace(1, 1, 4 << 20).append(LAYERS)
    choice = explain(Plan(1, rules, DENSE), LAYERS, block, 0, 2)
    return choice.levels, choice.grades


def test_without_levels_all_segments_have_the_codecs_own() -> None:
    assert levels(PlanRule("*", ONE)) == ((), ())
    assert levels(PlanRule("*", DENSE), PlanRule("b", ONE, levels=(1, 2))) == ((), ()), "the block goes dense"
    assert levels(PlanRule("*", ONE, levels=(10_000, 10_000))) == ((), ())


def test_each_segment_follows_the_rule_of_its_own_tensor() -> None:
    rules = (PlanRule("*", ONE, levels=(20_000, 10_000)), PlanRule("b", TEN))
    assert levels(*rules) == (((20_000, 100_000, 20_000), (10_000, 100_000, 10_000)), (44_000, 37_000))
    assert levels(PlanRule("*", ONE), PlanRule("c", TEN)) == (((10_000, 10_000, 100_000),), (19_000,))


@pytest.mark.parametrize("rules", [(PlanRule("b", DENSE),), (PlanRule("b", OTHER, levels=(5, 4)),)])
def test_what_a_plan_excludes_is_sent_as_it_is(rules: tuple[PlanRule, ...]) -> None:
    assert levels(PlanRule("*", ONE), *rules) == (((10_000, 1_000_000, 10_000),), (307_000,))
    assert levels(PlanRule("[ac]", ONE)) == (((10_000, 1_000_000, 10_000),), (307_000,)), "no rule at all"
    bits = graded("onebit", 32, 0, 0)
    assert levels(PlanRule("*", msgspec.structs.replace(bits, levels=(0, 0))), *rules) == ((), ())


def test_a_segment_goes_no_further_than_the_blocks_codec() -> None:
    whole = msgspec.structs.replace(LOW_RANK, level=4)
    assert levels(PlanRule("*", whole), PlanRule("b", HIGH_RANK, levels=(8, 2)), PlanRule("c", DENSE)) == (
        ((4, 4, 65), (4, 2, 65)),
        (4, 4),
    )


def test_a_segment_is_found_wherever_its_block_begins() -> None:
    section = Section(0, (TensorSpec("a", (100_000,), 0), TensorSpec("b", (200_000,), 0)))
    blocks = AddressSpace(1, 1, 256 << 10).append(section)
    plan = Plan(1, (PlanRule("*", ONE), PlanRule("a", TEN)), DENSE)
    found = [explain(plan, section, b, 0, 2) for b in blocks]
    assert [len(b.bounds) - 1 for b in blocks] == [1, 2, 1, 1, 1]
    assert found[1].levels == ((100_000, 10_000),)
    assert all(c.levels == () for c in (found[0], *found[2:]))


def test_names_with_glob_characters_are_matched_as_they_are() -> None:
    """A plan may name every tensor; such rules are looked up, and the last match still wins."""
    section = Section(0, (TensorSpec("m.[0].w*", (50_000,), 0),))
    (block,) = AddressSpace(1, 1, 4 << 20).append(section)
    exact = PlanRule("m.[[]0].w[*]", TEN)

    def spec(*rules: PlanRule) -> str:
        return explain(Plan(1, rules, DENSE), section, block, 0, 2).codec.spec

    assert spec(exact) == "topk(ratio=0.1)" == spec(PlanRule("*", ONE), exact)
    assert spec(exact, PlanRule("m.*", ONE)) == "topk(ratio=0.01)"
    assert spec(exact, PlanRule("n.*", ONE), PlanRule("m.[[]1].w[*]", ONE)) == "topk(ratio=0.1)"
    assert spec(PlanRule("m.[0].w*", ONE)) == "none"


def test_levels_of_rules_are_checked() -> None:
    def find(spec: str) -> CodecChoice:
        return {"none": DENSE, "topk": ONE, "powersgd": LOW_RANK}[spec]

    assert compiled(Rule("w", "topk", levels=(20_000, 5)), find) == PlanRule("w", ONE, levels=(20_000, 5))
    for rule, says in (
        (Rule("w", "none", levels=(1,)), r"expected none for none, which has no levels; got \[1\]"),
        (Rule("w", "powersgd", levels=(4, 5)), r"expected within 1..4 for powersgd\(rank=4\); got 5"),
        (Rule("w", "topk", levels=(0,)), r"expected within 1..1000000 for topk\(ratio=0.01\); got 0"),
    ):
        with pytest.raises(PlanError, match=says):
            compiled(rule, find)
    three, two, none = Rule("v", "topk", levels=(3, 2, 1)), Rule("w", "powersgd", levels=(2, 1)), Rule("x", "topk")
    assert unusable((none, three, none, three), find) is None
    found = unusable((none, three, none, two), find)
    assert found == (3, "rule 'w': levels: expected at 3 notches, as rule 'v' has them; got 2")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule("[!" * 2049, "topk"), "pattern: expected at most 4096 characters"),
        (Rule("[*]" * 4097, "topk"), "pattern: expected at most 4096 characters"),
        (Rule("w", "topk" + "+ef" * 400), "codec: expected at most 1024 characters"),
    ],
)
def test_what_is_too_long_is_refused_before_it_is_looked_into(rule: Rule, said: str) -> None:
    """Making a regular expression of 40,000 characters takes a quarter of a minute."""

    def resolve(spec: str) -> CodecChoice:
        raise AssertionError("nothing is resolved")

    bad = unusable((rule,), resolve)
    assert bad is not None and said in bad[1] and len(bad[1]) < 400


def test_a_plan_has_so_many_patterns_and_any_number_of_names() -> None:
    """Each pattern may have to be tried for every tensor of a model, while leases run."""
    names = [Rule(f"w[[]{i}]", "none") for i in range(2 * MAX_GLOBS)]
    globs = [Rule(f"w{i}.*", "none") for i in range(MAX_GLOBS)]
    assert unusable((*names, *globs), lambda spec: DENSE) is None
    found = unusable((*globs, *names, Rule("v*", "none")), lambda spec: DENSE)
    assert found is not None and found[0] == 3 * MAX_GLOBS
    assert f"rule 'v*': expected at most {MAX_GLOBS} rules of a plan with patterns" in found[1]


def test_a_name_may_be_as_long_as_names_are() -> None:
    assert unusable((Rule("[*]" * 4096, "none"), Rule("w" * 4096, "none")), lambda spec: DENSE) is None


class Counted(str):
    """A pattern that counts how often it is looked at as a key."""

    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


def test_a_block_of_a_model_of_many_tensors_is_explained_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for every block whenever a plan begins, in processes that have heartbeats to send."""
    graded = CodecChoice("topk(ratio=0.01)", 4, 10_000, True, True, levels=(1, 1_000_000), own=10_000, tunable=True)
    # A third of them empty, which have no segments.
    tensors = tuple(TensorSpec(f"t{i}", (i % 3, 997), 0) for i in range(3000))
    section = Section(0, tensors, (1000, 2000))
    rules = (
        PlanRule("*", graded),
        *(PlanRule(Counted(t.name), graded, levels=(i + 1,)) for i, t in enumerate(tensors)),
    )
    plan = Plan(1, rules, DENSE)
    blocks = AddressSpace(2, 1, 256 << 10).append(section)
    wanted, at = {}, 0
    for i, t in enumerate(tensors):
        for b in blocks:
            if max(at, b.start) < min(at + t.elements, b.start + b.elements):
                wanted.setdefault(b.key, []).append(i + 1)
        at += t.elements
    first = explain(plan, section, blocks[0], 64 << 10, 2)
    looked = 0
    sizes = TensorSpec.elements

    def counted(t: TensorSpec) -> int:
        nonlocal looked
        looked += 1
        return int(sizes.fget(t))  # type: ignore[attr-defined]

    monkeypatch.setattr(TensorSpec, "elements", property(counted))
    Counted.hashed = 0
    found = [explain(plan, section, b, 64 << 10, 2) for b in blocks]
    assert found[0] == first
    assert {b.key: list(c.levels[0]) for b, c in zip(blocks, found, strict=True)} == wanted
    assert Counted.hashed == 0, "the rules are put in order once a plan"
    assert looked < 100 * len(blocks)
