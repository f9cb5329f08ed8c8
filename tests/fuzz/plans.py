"""Target: texts of plans: codec specs, rules with their patterns, schemes and levels, controllers, steps in a layout.

They come from operators, other nodes and workers. Only the refusals of their readers may come of them, and what is
accepted must be laid over a model.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec

from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import Rule
from gcserver.codecs import CodecError, parse
from gcserver.core import plan as plans
from gcserver.core.events import Plan
from gcserver.planner import controllers
from gcserver.runtime.resolve import resolve
from tests.fuzz import mutate
from tests.fuzz.payloads import VARIANTS

SPECS: Final = (
    *VARIANTS, "powersgd(rank=2)", "topk(ratio=0.01)+ef(decay=0.9)", "sidco-e(ratio=0.001)+momentum(m=0.9)",
)  # fmt: skip
CONTROLLERS: Final = ("none", "dc2-da2", "dc2-da2(k_min=0.01,k_max=0.2,start=0.05)", "dc2-da5(start=1)")
PATTERNS: Final = ("*", "w*", "layer.?.[a-c]*", "[!x]*", "ln.bias")
SCHEMES: Final = ("", "owner", "all")
SECTION: Final = Section(0, (TensorSpec("w", (96, 8), 0), TensorSpec("ln.bias", (40,), 0)))


class Plans:
    """Rules and what is in them."""

    name = "plans"

    def __init__(self) -> None:
        self._blocks = AddressSpace(2, 1, 4096).append(SECTION)
        self._dense = resolve("none")
        assert (
            self.feed(msgspec.msgpack.encode([[["*", "topk(ratio=0.01)", "owner", [10, 20]]], "dc2-da2"])) == "a plan"
        )

    def close(self) -> None:
        pass

    def draw(self, rng: random.Random) -> bytes:
        rules = [
            [rng.choice(PATTERNS), rng.choice(SPECS), rng.choice(SCHEMES), rng.choice(([], [], [20_000, 10_000]))]
            for _ in range(rng.randrange(1, 4))
        ]
        tree = [rules, rng.choice(CONTROLLERS)]
        if rng.random() < 0.5:
            which = rng.randrange(2)
            text = tree[1] if which else rules[0][1]
            other = rng.choice(SPECS + CONTROLLERS).encode()
            spoiled = mutate.spoil(rng, str(text).encode(), other).decode("utf-8", "replace")
            if which:
                tree[1] = spoiled
            else:
                rules[0][1] = spoiled
            return msgspec.msgpack.encode(tree)
        return mutate.pack(mutate.grow(rng, tree))

    def feed(self, data: bytes) -> str:
        outcome = self._feed(data)
        assert parse("topk(ratio=0.01)").level == 10_000
        return outcome

    def _feed(self, data: bytes) -> str:
        try:
            rules, controller = msgspec.msgpack.decode(data, type=tuple[tuple[Rule, ...], str])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "no text"
        if controllers.unusable(controller):
            return "no controller"
        again = controllers.read(controllers.read(controller).text)
        assert again == controllers.read(controller)
        if plans.unusable(rules, resolve) is not None:
            return "no rules"
        plan = Plan(1, tuple(plans.compiled(rule, resolve) for rule in rules), self._dense)
        for block in self._blocks:
            self._lay(plan, block)
        return "a plan"

    def _lay(self, plan: Plan, block: Any) -> None:
        choice = plans.explain(plan, SECTION, block, 0, 2)
        try:
            codec = parse(choice.codec.spec)
        except CodecError as error:
            raise AssertionError(f"a plan holds what no lane can run: {error}") from error
        assert codec.id == choice.codec.id
        for levels in choice.levels:
            assert len(levels) == len(block.bounds) - 1
