"""The table of faults is current, and planting one makes the suites fail. That all are noticed: `make mutants`.

What may live here: the table and one fault. What may not: the others, which take minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import planted_epochs
from tests.simulation.mutants import MUTANTS, Mutant, Stale
from tests.simulation.mutate import NOTICED, PLANTED, changes


def test_no_fault_is_stale() -> None:
    assert len(MUTANTS) >= 30
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        compile(mutant.source(), mutant.file, "exec")


def test_every_fault_changes_a_function_of_the_core() -> None:
    for mutant in MUTANTS:
        for function, code in changes(mutant):
            assert function.__module__ == "gcserver.core." + mutant.file.removesuffix(".py")
            assert function.__code__ != code and function.__qualname__ == code.co_qualname
    with pytest.raises(RuntimeError, match="no function"):
        changes(Mutant("lane.py", "early: Early = field(default_factory=Early)", "early: Early = Early()", "nothing"))


def test_of_every_fault_it_is_recorded_what_notices_it() -> None:
    names = {m.name for m in MUTANTS} | {PLANTED + name for name in planted_epochs.PLANTED}
    assert set(json.loads(NOTICED.read_text())) == names


def test_a_line_that_is_gone_or_there_twice_is_an_error() -> None:
    with pytest.raises(Stale, match="0 lines"):
        Mutant("link.py", "this line is nowhere", "pass", "nothing").source()
    with pytest.raises(Stale, match="4 lines"):
        Mutant("exchange.py", "d.give_back(h, handle)", "pass", "something").source()


@pytest.mark.slow
def test_a_planted_fault_is_noticed() -> None:
    name = next(m.name for m in MUTANTS if m.breaks == "sums are divided too")
    command = [sys.executable, "-m", "tests.simulation.mutate", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == name and result["by"].startswith("simulation, seed")
