"""Whole courses of plans, on machines that others use: they end close to the shortest step, and then are quiet."""

from __future__ import annotations

import pytest

from tests.unit.planner.courses import Course, Machine, ended

#: What kinds must gain (`families.GAINS`) and what a machine that changes hides.
WORST = 1.12


@pytest.mark.parametrize("gbits", [1.0, 10.0])
def test_a_job_ends_with_steps_close_to_the_shortest(gbits: float) -> None:
    found = [ended(seed, gbits, drift=0.2, steps=500) for seed in range(2)]
    assert max(f.rules for f in found) < WORST
    assert all(f.tries > 1 for f in found)


def test_on_a_quiet_machine_a_plan_is_found_and_kept() -> None:
    machine = Machine(7, 1.0, drift=0.0)
    course = Course(machine)
    list(course.run(800))
    settled, rules = course.version, course.rules
    list(course.run(200))
    assert (course.version, course.rules) == (settled, rules)
    assert machine.exact(rules) < machine.exact(()) / 1.5


def test_a_family_in_force_again_has_its_rules() -> None:
    course, used = Course(Machine(3, 10.0, drift=0.2)), []
    for _ in course.run(300):
        if not used or used[-1][0] != course.standing.family:
            used.append((course.standing.family, course.rules))
    planned = [(family, rules) for family, rules in used if rules]
    assert len(set(planned)) < len(planned), "some were in force again"
    assert len({family for family, _ in planned}) == len(set(planned))
