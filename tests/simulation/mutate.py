"""Plant each fault of `mutants.py` and `planted*.py`, and see who notices: ``python -m tests.simulation.mutate``.

What may live here: importing the core with a fault in it, running the suites, the report. What may not: the faults.

Every fault has a process of its own, in which the one file is imported from a changed copy in memory; nothing on disk
is touched. It runs the cheapest suites first: some seeds of the simulation, the unit tests of the core, more seeds.
Exits with 1 when a fault goes unnoticed, is stale, or when the suites fail without any.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.simulation.mutants import MUTANTS, Mutant, Stale

UNIT = ("tests/unit/core", "tests/simulation/test_scenarios.py")
#: seeds before and after the unit tests
FEW, MANY = 25, 250
#: of one fault, seconds: the suites take a tenth of it
LIMIT = 600.0
PLANTED = "planted: "


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault. ``by`` says what noticed it, empty when nothing did."""

    name: str
    by: str
    seconds: float


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the core with a line changed."""

    def __init__(self, mutant: Mutant) -> None:
        self.module = "gcserver.core." + mutant.file.removesuffix(".py")
        self.source = mutant.source()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, f"{module.__name__} with a fault", "exec"), module.__dict__)


def plant(mutant: Mutant) -> None:
    """From now on this process has the fault. Raises :class:`Stale`; RuntimeError if the core is imported already."""
    if any(name.startswith("gcserver.core") for name in sys.modules):
        raise RuntimeError("gcserver.core is imported already; a fault needs a fresh process")
    sys.meta_path.insert(0, _Changed(mutant))


def _seeds(seeds: Iterable[int], only: tuple[str, ...]) -> str:
    """What the first of these seeds says that does not hold; empty if all do."""
    from tests.simulation.run import play

    for seed in seeds:
        # Every second one without a choice of faults: mistakes and strains come in those alone.
        outcome = play(seed, () if seed % 2 else only)
        if outcome.error:
            return f"simulation, seed {seed}: {outcome.error.split(' [')[0]}"
    return ""


class _First:
    """A pytest plugin that remembers the first test that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _unit() -> str:
    import pytest
    from hypothesis import settings

    # A busy machine is not a fault.
    settings.register_profile("mutants", deadline=None)
    settings.load_profile("mutants")
    first = _First()
    pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *UNIT], plugins=[first])
    return first.failed


def suites(only: tuple[str, ...], lossy: bool = False) -> str:
    """What noticed that something is wrong, empty if nothing did; ``lossy``: it takes a job that goes on without a
    node."""
    from tests.simulation.run import seeds
    from tests.simulation.shape import LOSSY

    if lossy:
        return _seeds(range(LOSSY, LOSSY + MANY), only)
    ordinary, losses = seeds(FEW, MANY - FEW)
    return _seeds(range(FEW), only) or _unit() or _seeds((*ordinary, *losses), only)


def one(name: str) -> Result:
    """Plant the fault of this name here and run the suites; "": none, which must go unnoticed."""
    began = time.monotonic()
    if name.startswith(PLANTED):
        from tests.simulation.planted import PLANTED as faults
        from tests.simulation.planted import planted
        from tests.simulation.planted_epochs import NAMES as in_epochs

        with planted(name.removeprefix(PLANTED)):
            by = suites(faults[name.removeprefix(PLANTED)][3], name.removeprefix(PLANTED) in in_epochs)
    else:
        only: tuple[str, ...] = ()
        if name:
            mutant = next(m for m in MUTANTS if m.name == name)
            plant(mutant)
            only = mutant.faults
        by = suites(only)
    return Result(name, by, time.monotonic() - began)


def _process(name: str) -> Result:
    """``one`` in a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.simulation.mutate", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=Path(__file__).parents[2])
    except subprocess.TimeoutExpired:
        return Result(name, f"nothing ends within {LIMIT:g} s", time.monotonic() - began)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"the process for {name!r} failed: {done.stderr.strip()[-500:]}")
    return Result(**json.loads(lines[-1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(asdict(one(args.one))))
        return 0
    from tests.simulation.planted_epochs import PLANTED as faults

    names = [m.name for m in MUTANTS] + [PLANTED + name for name in faults]
    chosen = [n for n in names if args.only in n]
    try:
        for mutant in MUTANTS:
            mutant.source()
    except Stale as error:
        print(error)
        return 1
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(_process, ["", *chosen]):
            results.append(result)
            said = result.by or ("nothing, as it should" if not result.name else "NOTHING")
            print(f"{result.seconds:6.1f} s  {result.name or '(no fault)'}\n          noticed by {said}", flush=True)
    alone, *planted = results
    missed = [r.name for r in planted if not r.by]
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    print(f"{len(planted) - len(missed)} of {len(planted)} faults noticed" + "".join(f"\n  not: {n}" for n in missed))
    if alone.by:
        print(f"without any fault the suites fail already: {alone.by}")
    return 1 if missed or alone.by else 0


if __name__ == "__main__":
    sys.exit(main())
