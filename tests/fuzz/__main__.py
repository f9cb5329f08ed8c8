"""Feed hostile inputs to everything that reads what others wrote: ``python -m tests.fuzz --inputs 100000``.

One input: ``--target T --seed S --at I``. A file of the corpus: ``--target T --replay FILE``.

What may live here: the command, what a failure prints and saves. What may not: how one target is fed (`harness.py`),
how inputs are spread (`spread.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Final

from tests.fuzz import harness
from tests.fuzz.harness import Failure, Result
from tests.fuzz.spread import merged, run_all, slices
from tests.fuzz.targets import TARGETS

SAVED: Final = Path("out") / "fuzz"


def show(results: list[Result], seconds: float) -> None:
    """A table for people, then every failure with the command that makes it again."""
    print(f"{'target':<14}{'inputs':>9}  {'MiB first tenth, end, peak':<28}outcomes")
    for r in results:
        memory = f"{r.resident[0] >> 20}, {r.resident[1] >> 20}, {r.peak >> 20}"
        said = ", ".join(f"{n} {word}" for word, n in r.outcomes.most_common())
        print(f"{r.target:<14}{r.inputs:>9}  {memory:<28}{said}")
    failures = [f for r in results for f in r.failures]
    # One defect is met by many inputs: the shortest of each is shown.
    alike: dict[tuple[str, str], Failure] = {}
    for f in sorted(failures, key=lambda f: len(f.data)):
        alike.setdefault((f.target, f.error), f)
    for f in alike.values():
        name = SAVED / f"{f.target}-{f.seed}-{f.index}.hex"
        harness.write(name, f.data, f.error)
        shown = f.data[:200].hex() + ("..." if len(f.data) > 200 else "")
        print(f"\n{f.target}: {f.error}\n  input: {shown}\n  again: {f.command}\n  saved: {name}")
    if failures:
        print(f"\nreplay a saved input with --replay, and keep it in {harness.CORPUS.name}/ with the mend")
    fed = sum(r.inputs for r in results)
    print(f"\n{fed} inputs in {seconds:.0f} s, {len(failures)} failures ({len(alike)} different)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="how many, over all targets")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long, with what was fed by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only these (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--at", type=int, help="only this input of the target")
    parser.add_argument("--replay", type=Path, help="only the input in this file")
    args = parser.parse_args(argv)
    if args.at is not None or args.replay is not None:
        if len(args.target or ()) != 1:
            parser.error("--at and --replay need the one --target that the input is for")
        return _one(args.target[0], args.seed, args.at, args.replay)
    began = time.monotonic()
    names, until = args.target or list(TARGETS), began + args.seconds
    results = merged(run_all(slices(names, args.inputs, args.seed, args.jobs, until), args.jobs))
    seconds = time.monotonic() - began
    show(results, seconds)
    if args.json is not None:
        figures = [
            {"target": r.target, "inputs": r.inputs, "outcomes": r.outcomes, "failures": [f.error for f in r.failures],
             "resident_first": r.resident[0], "resident_end": r.resident[1], "peak": r.peak}
            for r in results
        ]  # fmt: skip
        args.json.write_text(json.dumps({"seed": args.seed, "seconds": seconds, "targets": figures}, indent=1) + "\n")
    return 1 if any(r.failures for r in results) else 0


def _one(name: str, seed: int, at: int | None, file: Path | None) -> int:
    target = TARGETS[name]()
    try:
        data = harness.read(file) if file is not None else target.draw(harness.generator(name, seed, at or 0))
        print(f"{len(data)} bytes: {data[:400].hex()}{'...' if len(data) > 400 else ''}")
        print(harness.feed(target, data))
    finally:
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
