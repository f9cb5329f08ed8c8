"""Jobs whose plans are made by `plan = "auto"` on machines that others use: how close to the shortest step they end.

``python -m tests.unit.planner.courses [--seeds 40] [--gbits 1,10] [--drift 0.2] [--noise 0.04] [--steps 600]
[--json FILE]``

What a step really takes beyond computing is what is predicted times a factor of its codec's kind (0.7 to 1.5) and of
its family (0.9 to 1.1), all that times how slow the machine is: others come and go every 10 to 50 s, and take up to
``--drift`` of it. The planner sees medians of steps as daemons measure them, and decides by `gcserver.planner` as
`gcserver.runtime.planning` has it.
"last" is the mean step of the last quarter, "rules" that of the plan that is then in force, over the shortest of all
families on a machine of its own; "tries" are changes of plan.

What may live here: such a machine and the loop around the planner's decisions. What may not: decisions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from gcserver.planner import course as decide
from gcserver.planner.auto import Wish, compose
from gcserver.planner.auto_rules import applied
from gcserver.planner.course import Act
from gcserver.planner.families import DENSE, candidates, kind
from gcserver.planner.live import Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Before, Rules, Standing, rules_of
from gcserver.runtime.measurements import SETTLING
from gcserver.runtime.plancourse import LOOK_EVERY, LOOK_SOON
from gcserver.runtime.planwish import as_planned, having_taken
from tests.unit.planner.live_profiles import gpt

WARMUP: Final = 20
#: low rank is in question at once, sparsifiers from step 100 on: within the steps that are played
LATE: Final = 10
#: Seconds in which a plan is made, while steps go on.
PLANNING: Final = 1.0
#: Of steps that differ by chance alone, standard deviation over mean, unless told otherwise.
NOISE: Final = 0.04
#: A daemon's medians are of so many steps at most.
WINDOW: Final = 200


class Machine:
    """What steps really take."""

    def __init__(self, seed: int, gbits: float, drift: float, layers: int = 8, noise: float = NOISE) -> None:
        self.profile: Profile = gpt(2, gbits * 1.2e8, whole=True, layers=layers)
        self.rng = np.random.default_rng(seed)
        kinds, known = self.rng.uniform(0.7, 1.5, 8), candidates({DENSE, *self.profile.codecs}, "balanced")
        self.factors = {spec.text: kinds[kind(spec.text)] * self.rng.uniform(0.9, 1.1) for spec in known}
        self.live = Live(self.profile, portions(self.profile, Wish().buckets))
        self.drift, self.slow, self.until, self.now = drift, 1.0, 0.0, 0.0
        self.noise = noise

    def exact(self, rules: Rules) -> float:
        """Seconds of a step under these rules while nobody else uses the machine."""
        plan = as_planned(rules)
        specs = {r.spec for r in rules if r.spec != DENSE}
        beyond = self.live.seconds(applied(self.live, plan)) - self.profile.compute
        return self.profile.compute + beyond * self.factors[specs.pop() if specs else DENSE]

    def shortest(self) -> float:
        """Of all families of the quality, as the planner would have them."""
        plans = (compose(self.profile, Wish(measure=spec)) for spec in self.factors)
        return min(self.exact(rules_of(plan)) for plan in plans)

    def step(self, rules: Rules) -> float:
        """Make one step: the seconds it took."""
        if self.now >= self.until:
            self.slow = 1.0 + self.rng.uniform(0.0, self.drift)
            self.until = self.now + self.rng.uniform(10.0, 50.0)
        took = self.exact(rules) * self.slow * math.exp(self.rng.normal(0.0, self.noise))
        self.now += took
        return float(took)


@dataclass(slots=True)
class Course:
    """One job: the rules in force under each version, the steps made under it, how planning stands."""

    machine: Machine
    rules: Rules = ()
    version: int = 0
    steps: dict[int, list[float]] = field(default_factory=lambda: {0: []})
    standing: Standing = field(default_factory=lambda: Standing("auto", "balanced"))
    looked: float = 0.0
    #: a plan that is being made: when it is there, for which family it was asked, of what was measured
    due: tuple[float, str, Profile] | None = None

    def run(self, steps: int) -> Iterator[float]:
        """The seconds of each step."""
        for made in range(steps):
            took = self.machine.step(self.rules)
            self.steps[self.version].append(took)
            yield took
            self.look(made + 1)

    def seen(self) -> Profile:
        rows = []
        for version, took in self.steps.items():
            last = took[SETTLING + 1 :][-WINDOW:]
            if last:
                middle = statistics.median(last)
                noise = 1.4826 * statistics.median(abs(t - middle) for t in last) / middle
                rows.append(StepTime(version, middle, noise, len(last)))
        return replace(self.machine.profile, steps=tuple(rows))

    def look(self, settled: int) -> None:
        """As the daemon does every second or every five."""
        now = self.machine.now
        if self.due is not None:
            if now >= self.due[0]:
                (_, measure, seen), self.due = self.due, None
                self.plan(seen, settled, measure)
            return
        if settled < WARMUP or now < self.looked:
            return
        seen = self.seen()
        self.looked = now + (LOOK_SOON if decide.on_trial(self.standing) else LOOK_EVERY)
        act, _ = decide.next_act(self.standing, 0, seen, settled, LATE)
        if act is Act.KEEP:
            self.standing, self.looked = decide.judged(self.standing, seen), 0.0
        elif act is Act.TAKE_BACK:
            learned, before, tried = decide.learned(self.standing, seen), self.standing.before, self.standing.rules
            assert before is not None
            self.put(before.rules, before.family, None)
            self.standing = replace(self.standing, taken_back=(*self.standing.taken_back, tried), **learned)
        elif act in (Act.PLAN, Act.MEASURE):
            step = decide.step_under(seen, self.version)
            if self.standing.profile is None or (step is not None and step.steps >= decide.COMPARED):
                self.standing = replace(self.standing, **decide.unlearned(self.standing, seen, settled))
                self.due = now + PLANNING, decide.in_turn(self.standing) if act is Act.MEASURE else "", seen

    def plan(self, seen: Profile, settled: int, measure: str) -> None:
        """As `Planning._plan`."""
        was, step = self.standing, decide.step_under(seen, self.version)
        made_by = as_planned(self.rules)
        hope = decide.SURPRISE if was.took else 0.0
        wish = having_taken(Wish(made=settled, late_after=LATE, measure=measure, hope=hope), was)
        if step is not None:
            wish = replace(wish, rules=made_by, step=step.seconds, running=was.family)
        proposal = compose(seen, wish)
        found: dict[str, Any] = {
            "profile": seen, "proposal": proposal, "domain": 0, "considered": len(was.took), "at": settled,
            "stayed": step is not None and decide.stays_dense(proposal, made_by),
            "in_turn": (*was.in_turn, measure) if measure else was.in_turn,
        }  # fmt: skip
        rules = rules_of(proposal)
        if not decide.switch(was, proposal, step, self.rules, made_by, measure)[0]:
            self.standing = replace(was, **found, running=decide.running(was, proposal, step, self.rules, made_by))
            return
        before = decide.replaced(was, self.rules, step, proposal, made_by)
        self.put(rules, proposal.family, before)
        if before is None:
            found |= decide.anew(self.standing, proposal.family)
        self.standing = replace(self.standing, **found)

    def put(self, rules: Rules, family: str, before: Before | None) -> None:
        asked = replace(self.standing, asked=rules, asked_as=family, asked_before=before)
        self.version += 1
        self.rules, self.steps[self.version] = rules, []
        self.standing = decide.noticed(asked, self.version, rules, True)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, over the shortest step; tries: changes of its plan."""

    seed: int
    family: str
    last: float
    rules: float
    tries: int


def ended(seed: int, gbits: float, drift: float, steps: int, layers: int = 8, noise: float = NOISE) -> Ended:
    """Run one job."""
    machine = Machine(seed, gbits, drift, layers, noise)
    shortest, course = machine.shortest(), Course(machine)
    took = list(course.run(steps))
    last = statistics.mean(took[-steps // 4 :])
    return Ended(
        seed, course.standing.family, last / shortest, machine.exact(course.rules) / shortest, course.version
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--gbits", default="1,10", help="of the links (default 1,10)")
    parser.add_argument("--drift", type=float, default=0.2)
    parser.add_argument("--noise", type=float, default=NOISE, help=f"of each step (default {NOISE:g})")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for gbits in map(float, args.gbits.split(",")):
        found = []
        for seed in range(args.seeds):
            found.append(ended(seed, gbits, args.drift, args.steps, noise=args.noise))
            played = {"gbits": gbits, "drift": args.drift, "noise": args.noise}
            rows.append(played | {k: getattr(found[-1], k) for k in Ended.__slots__})
            if sys.stderr.isatty():
                print(f"\r{gbits:g} Gbit/s: seed {seed + 1} of {args.seeds}", end="", file=sys.stderr)
        for what in ("rules", "last"):
            of = [getattr(f, what) for f in found]
            print(f"{gbits:g} Gbit/s, {what}: mean {statistics.mean(of):.3f}, worst {max(of):.3f} x the shortest")
        print(f"{gbits:g} Gbit/s: {statistics.mean(f.tries for f in found):.1f} changes of plan")
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
