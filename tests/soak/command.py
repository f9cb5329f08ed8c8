"""What the command lines of soaks that go on for a given time share.

What may live here: for how long, and where figures go. What may not: what a soak does in that time.
"""

from __future__ import annotations

import argparse


def parser(about: str | None) -> argparse.ArgumentParser:
    """With ``--minutes`` (ten), ``--seconds`` and ``--json``."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = made.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=10.0)
    length.add_argument("--seconds", type=float)
    made.add_argument("--json", metavar="FILE")
    return made


def seconds(args: argparse.Namespace) -> float:
    """For how long."""
    return args.seconds if args.seconds is not None else 60 * args.minutes
