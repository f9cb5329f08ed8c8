"""How much of `gcserver/core` the simulation reaches: ``python -m tests.simulation.reach [--seeds 600]``.

What may live here: counting branches while seeds are played. What may not: which worlds there are, unit tests: what
they reach alone does not count here.

Prints the share of branches and every branch that no seed took; exits with 1 below ``--least`` percent. The scenario
scripts are played as well. Each process plays every n-th seed and counts for itself; the core must not be imported
before it counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
#: percent of branches, of all files of the core together
LEAST = 95.0


def count(first: int, worlds: int, every: int, folder: Path) -> int:
    """Play every n-th seed from ``first`` on, counting; how many broke a guarantee."""
    cov = coverage.Coverage(
        branch=True, source_pkgs=["gcserver.core"], data_file=folder / "data", data_suffix=str(first)
    )
    cov.start()
    from tests.simulation.run import command, play, seeds
    from tests.simulation.test_scenarios import SCRIPTS
    from tests.simulation.test_scenarios import play as play_script

    bad = 0
    for script in SCRIPTS[first::every]:
        play_script(script.read_text())
    ordinary, lossy = seeds(0, worlds)
    for seed in (*ordinary, *lossy)[first::every]:
        outcome = play(seed)
        if outcome.error:
            bad += 1
            print(f"seed {seed}: {outcome.error}\n  replay: {command(seed)}", flush=True)
    cov.stop()
    cov.save()
    return bad


def report(folder: Path, every: bool) -> float:
    """Percent of branches that were taken; prints those that were not, ``every`` or only how many a file."""
    cov = coverage.Coverage(branch=True, source_pkgs=["gcserver.core"], data_file=folder / "data")
    cov.combine([str(folder)])
    with contextlib.redirect_stdout(io.StringIO()):
        cov.json_report(outfile=str(folder / "report.json"))
    found = json.loads((folder / "report.json").read_text())
    for name, of in sorted(found["files"].items()):
        missed = of["missing_branches"]
        if missed:
            print(f"{name}: {of['summary']['covered_branches']} of {of['summary']['num_branches']} branches")
        lines = (ROOT / name).read_text().splitlines() if every else []
        for at, to in missed if every else ():
            print(f"  {at} -> {to if to > 0 else 'exit'}: {lines[at - 1].strip()}")
    totals = found["totals"]
    percent = 100.0 * totals["covered_branches"] / totals["num_branches"]
    print(f"{totals['covered_branches']} of {totals['num_branches']} branches of gcserver/core: {percent:.1f} %")
    return percent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.reach", description=__doc__)
    parser.add_argument("--seeds", type=int, default=600, help="how many worlds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--least", type=float, default=LEAST, help="percent below which this fails")
    parser.add_argument("--every", action="store_true", help="print every branch that was not taken")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        return min(1, count(args.part, args.seeds, args.jobs, args.folder))
    with tempfile.TemporaryDirectory(prefix="gc-reach-") as folder:
        command = [sys.executable, "-m", "tests.simulation.reach", "--seeds", str(args.seeds), "--jobs", str(args.jobs)]
        command += ["--folder", folder, "--part"]
        parts = [subprocess.Popen([*command, str(i)], cwd=ROOT) for i in range(args.jobs)]
        bad = sum(part.wait() != 0 for part in parts)
        percent = report(Path(folder), args.every)
    if percent < args.least:
        print(
            f"expected at least {args.least:g} %: see with --every what is not reached, and play it in tests/simulation"
        )
    return 1 if bad or percent < args.least else 0


if __name__ == "__main__":
    sys.exit(main())
