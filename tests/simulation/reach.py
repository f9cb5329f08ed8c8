"""How much of `gcserver/core` the simulation reaches: ``python -m tests.simulation.reach [--seeds 600]``.

What may live here: counting branches while seeds are played. What may not: which worlds there are, unit tests: what
they reach alone does not count here.

Prints the share of branches and every branch that no seed took; exits with 1 below ``--least`` percent. The scenario
scripts and the known worlds are played as well. Each process plays every n-th seed and counts for itself; the core must
not be imported before it counts. Counting makes a world take several times as long: ``--kept`` counts only in those
worlds that reached something new when ``--record`` last looked, and plays the others without.
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
#: the seeds that `--record` kept
KEPT = Path(__file__).with_name("reaching.json")
#: percent of branches, of all files of the core together
LEAST = 95.0


def count(args: argparse.Namespace) -> int:
    """Play every n-th seed from ``args.part`` on, counting; how many broke a guarantee."""
    first, every, folder = args.part, args.jobs, args.folder
    cov = coverage.Coverage(
        branch=True, source_pkgs=["gcserver.core"], data_file=folder / "data", data_suffix=str(first)
    )
    cov.start()
    from tests.simulation.known import WORLDS
    from tests.simulation.run import command, play, seeds
    from tests.simulation.test_scenarios import SCRIPTS
    from tests.simulation.test_scenarios import play as play_script

    bad = 0
    for script in SCRIPTS[first::every]:
        play_script(script.read_text())
    for world in WORLDS[first::every]:
        world()
    ordinary, lossy = seeds(0, args.seeds)
    played = (*ordinary, *lossy)[first::every]
    counted = set(json.loads(KEPT.read_text())) if args.kept else set(played)

    def broken(seed: int) -> bool:
        outcome = play(seed)
        if outcome.error:
            print(f"seed {seed}: {outcome.error}\n  replay: {command(seed)}", flush=True)
        return bool(outcome.error)

    reached, new = 0, []
    for seed in filter(counted.__contains__, played):
        bad += broken(seed)
        if args.record and (now := _arcs(cov)) > reached:
            reached = now
            new.append(seed)
    cov.stop()
    cov.save()
    bad += sum(broken(seed) for seed in played if seed not in counted)
    if args.record:
        (folder / f"kept{first}.json").write_text(json.dumps(new))
    return bad


def _arcs(cov: coverage.Coverage) -> int:
    """How many there are by now."""
    data = cov.get_data()
    return sum(len(data.arcs(name) or ()) for name in data.measured_files())


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
    parser.add_argument("--kept", action="store_true", help="count only in the seeds that are kept")
    parser.add_argument("--record", action="store_true", help="keep the seeds that reach something new")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        return min(1, count(args))
    with tempfile.TemporaryDirectory(prefix="gc-reach-") as folder:
        command = [sys.executable, "-m", "tests.simulation.reach", "--seeds", str(args.seeds), "--jobs", str(args.jobs)]
        command += [flag for flag in ("--kept", "--record") if getattr(args, flag[2:])]
        command += ["--folder", folder, "--part"]
        parts = [subprocess.Popen([*command, str(i)], cwd=ROOT) for i in range(args.jobs)]
        bad = sum(part.wait() != 0 for part in parts)
        if args.record:
            kept = [seed for path in sorted(Path(folder).glob("kept*.json")) for seed in json.loads(path.read_text())]
            KEPT.write_text(json.dumps(sorted(kept)) + "\n")
            print(f"{len(kept)} of {args.seeds} seeds reach something new")
        percent = report(Path(folder), args.every)
    if percent < args.least:
        print(
            f"expected at least {args.least:g} %: see with --every what is not reached, and play it in tests/simulation"
        )
    return 1 if bad or percent < args.least else 0


if __name__ == "__main__":
    sys.exit(main())
