"""Plant each fault of `mutants.py` and `planted*.py`, and see who notices: ``python -m tests.simulation.mutate``.

What may live here: planting a fault in a process, running the suites, the report. What may not: the faults.

Every fault has a process of its own, forked once everything is imported, in which the code of the changed function
takes the place of the right one; nothing on disk is touched. First comes what is known to notice the fault
(`noticed.json`), a seed or a unit test; only where that does not the suites do: some seeds of the simulation, the unit
tests of the core, more seeds. In the end everything that noticed something is run once more without any fault, and must
be silent. Exits with 1 when a fault goes unnoticed, is stale, or when something is noticed without any.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.simulation.mutants import CORE, MUTANTS, Mutant, Stale

UNIT = ("tests/unit/core", "tests/simulation/test_scenarios.py")
#: what noticed each fault when that was last recorded: a seed, or a test
NOTICED = Path(__file__).with_name("noticed.json")
#: seeds before and after the unit tests
FEW, MANY = 25, 250
#: of one fault, seconds: the suites take a tenth of it
LIMIT = 600.0
PLANTED = "planted: "
SEED = "simulation, seed "


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault. ``by`` says what noticed it, empty when nothing did; no ``name``: of none."""

    name: str
    by: str
    seconds: float


def plant(mutant: Mutant) -> None:
    """From now on this process has the fault. Raises :class:`Stale`; RuntimeError if no function changes by it."""
    for function, code in changes(mutant):
        function.__code__ = code


def changes(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """The functions of the core that a fault changes, with their code then."""
    module = importlib.import_module("gcserver.core." + mutant.file.removesuffix(".py"))
    path = CORE / mutant.file
    before = dict(_functions(compile(path.read_text(), str(path), "exec", dont_inherit=True)))
    after = dict(_functions(compile(mutant.source(), str(path), "exec", dont_inherit=True)))
    found = [(_function(module, name), code) for name, code in after.items() if code != before[name]]
    if not found:
        raise RuntimeError(f"{mutant.name}: no function of {mutant.file} changes by it")
    return found


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions and methods of a module's code, by their names within it; not those inside others."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_flags & inspect.CO_OPTIMIZED:
                yield const.co_qualname, const
            else:
                yield from _functions(const)


def _function(module: Any, name: str) -> FunctionType:
    found = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, classmethod | staticmethod):
        found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise RuntimeError(f"{module.__name__}.{name} is {found!r}, expected a function")
    return found


def _seeds(seeds: Iterable[int], only: tuple[str, ...]) -> str:
    """What the first of these seeds says that does not hold; empty if all do."""
    from tests.simulation.run import play

    for seed in seeds:
        # Every second one without a choice of faults: mistakes and strains come in those alone.
        outcome = play(seed, () if seed % 2 else only)
        if outcome.error:
            return f"{SEED}{seed}: {outcome.error.split(' [')[0]}"
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


def _unit(*tests: str) -> str:
    """The first of these tests that fails, of all unit tests when none is named; empty if none does."""
    import pytest
    from hypothesis import settings

    # A busy machine is not a fault, and the same inputs come in every run.
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    settings.load_profile("mutants")
    first = _First()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*options, *(tests or UNIT)], plugins=[first])
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


def _known(hint: str, only: tuple[str, ...]) -> str:
    """What the seed or the test notices that is known to notice a fault; empty if that is silent."""
    if not hint:
        return ""
    return _seeds([int(hint)], only) if hint.isdigit() else _unit(hint)


def hint_of(by: str) -> str:
    """As `noticed.json` has it: the seed, or the test."""
    return by.removeprefix(SEED).split(":")[0] if by.startswith(SEED) else by


def _only(name: str) -> tuple[str, ...]:
    """The kinds of fault of the world that bring a fault out."""
    from tests.simulation.planted_epochs import PLANTED as faults

    if name.startswith(PLANTED):
        return faults[name.removeprefix(PLANTED)][3]
    return next(m for m in MUTANTS if m.name == name).faults


def one(name: str, hint: str = "") -> Result:
    """Plant the fault of this name here, and run what is known to notice it, then the suites."""
    from tests.simulation.planted import planted
    from tests.simulation.planted_epochs import NAMES as in_epochs

    began, only = time.monotonic(), _only(name)
    patch: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if name.startswith(PLANTED):
        patch = planted(name.removeprefix(PLANTED))
    else:
        plant(next(m for m in MUTANTS if m.name == name))
    with patch:
        by = _known(hint, only) or suites(only, name.removeprefix(PLANTED) in in_epochs)
    return Result(name, by, time.monotonic() - began)


def without(results: list[Result]) -> Result:
    """Everything that noticed a fault, where there is none."""
    began = time.monotonic()
    hints = {(hint_of(r.by), _only(r.name)) for r in results if r.by}
    plays = sorted((int(hint), only) for hint, only in hints if hint.isdigit())
    by = next(filter(None, (_seeds([seed], only) for seed, only in plays)), "")
    tests = sorted({hint for hint, _ in hints if "::" in hint})
    return Result("", by or (_unit(*tests) if tests else ""), time.monotonic() - began)


def _forked(jobs: int, work: Iterable[tuple[str, Callable[[], Result]]]) -> Iterator[Result]:
    """Each piece of work in a fork of this process, ``jobs`` at a time; results as they come."""
    context = multiprocessing.get_context("fork")
    left, running = list(work), {}
    while left or running:
        while left and len(running) < jobs:
            name, do = left.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(do, theirs))
            process.start()
            theirs.close()
            running[mine] = name, process, time.monotonic()
        for ready in wait(list(running), timeout=1.0):
            name, process, began = running.pop(ready)  # type: ignore[index]
            try:
                yield ready.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                raise RuntimeError(f"the process for {name!r} ended with {process.exitcode} and no result") from None
            process.join()
        for mine, (name, process, began) in list(running.items()):
            if time.monotonic() - began > LIMIT:
                process.kill()
                process.join()
                del running[mine]
                yield Result(name, f"nothing ends within {LIMIT:g} s", time.monotonic() - began)


def _child(do: Callable[[], Result], out: Connection) -> None:
    os.chdir(Path(__file__).parents[2])
    out.send(do())


def _work(name: str, hint: str) -> tuple[str, Callable[[], Result]]:
    return name, lambda: one(name, hint)


def _say(result: Result, hint: str) -> None:
    said = result.by or ("nothing, as it should" if not result.name else "NOTHING")
    other = " (another one is on record)" if result.name and hint_of(result.by) != hint else ""
    print(f"{result.seconds:6.1f} s  {result.name or '(no fault)'}\n          noticed by {said}{other}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--record", action="store_true", help=f"write what noticed each into {NOTICED.name}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    hints: dict[str, str] = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}
    if args.one is not None:
        print(json.dumps(asdict(one(args.one, hints.get(args.one, "")))))
        return 0
    # Everything that a fork would import otherwise.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    import tests.simulation.run  # noqa: F401
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
    for result in _forked(args.jobs, [_work(name, hints.get(name, "")) for name in chosen]):
        results.append(result)
        _say(result, hints.get(result.name, ""))
    alone = next(_forked(1, [("", lambda: without(results))]))
    _say(alone, "")
    missed = [r.name for r in results if not r.by]
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in (alone, *results)], indent=2) + "\n")
    if args.record:
        hints |= {r.name: hint_of(r.by) for r in results if r.by}
        NOTICED.write_text(json.dumps({n: hints[n] for n in names if n in hints}, indent=2) + "\n")
    spent = os.times()
    cpu = spent.children_user + spent.children_system
    print(f"{len(results) - len(missed)} of {len(results)} faults noticed in {cpu:.0f} CPU s")
    print("".join(f"  not: {n}\n" for n in missed), end="")
    if alone.by:
        print(f"without any fault this fails already: {alone.by}")
    return 1 if missed or alone.by else 0


if __name__ == "__main__":
    sys.exit(main())
