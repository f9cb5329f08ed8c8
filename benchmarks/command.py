"""What the command lines of benchmarks share: values that are checked before anything starts, rows shown as they come.

What may live here: readers for argparse's ``type=``, which refuse a value with what would be accepted; running a
benchmark part by part. What may not: which options a benchmark has, and what it measures.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from benchmarks import common
from benchmarks.lab import daemons, netns, processes

T = TypeVar("T")


def _accepted(read: Callable[[str], T], text: str) -> T:
    """What ``read`` makes of a text; what it says of one that it refuses is argparse's message."""
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """``"2,4"``: whole numbers from 1 on."""
    return [count(part) for part in text.split(",")]


def listed(text: str) -> list[str]:
    """``"ddp, topk(ratio=0.01,values=16)"``: what stands between commas; those inside parentheses belong to a codec."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def size(text: str) -> int:
    """``"64MiB"`` as bytes."""
    return _accepted(common.read_size, text)


def sizes(text: str) -> list[int]:
    """``"4KiB,1MiB"``, ``"4KiB..256MiB"`` as bytes."""
    return _accepted(common.read_sizes, text)


def rate(text: str) -> str:
    """A rate of links, as it was written."""
    _accepted(netns.bits_per_second, text)
    return text


def network(text: str) -> str:
    """A rate, or one of ``netns.UNSHAPED``."""
    if text in netns.UNSHAPED:
        return text
    try:
        return rate(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or one of {', '.join(netns.UNSHAPED)}") from None


def networks(text: str) -> list[str]:
    """``"1gbit,loopback"``: networks."""
    return [network(part) for part in text.split(",")]


def setting(text: str) -> tuple[str, str]:
    """``"node.lanes=2"`` as key and value of a daemon's configuration; the daemon checks both."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def parser(about: str | None, quick: str) -> argparse.ArgumentParser:
    """With the options of every benchmark that :func:`run` runs; ``quick`` says what ``--quick`` leaves."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--network", type=network, default="loopback", help="loopback, unshaped (namespaces), or a rate as 1gbit"
    )
    made.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="a key of the daemons"
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", metavar="FILE")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def written(name: str, argv: Sequence[str] | None) -> str:
    """The command as it was given; ``argv`` None: the process's own."""
    return " ".join([f"python -m benchmarks.{name}", *(sys.argv[1:] if argv is None else argv)])


def worked(args: argparse.Namespace, work: Callable[[T], None], task: type[T]) -> bool:
    """Whether this process is a worker, which then has done the ``task`` that it was started with."""
    if args.worker is None:
        return False
    work(msgspec.json.decode(args.worker, type=task))
    return True


def run(
    args: argparse.Namespace,
    command: str,
    parts: Iterable[tuple[str, Iterable[list[common.Row]]]],
    show: Callable[[common.Row], str],
) -> int:
    """Measures the parts (heading, rows as they come) one after the other and prints them; the exit status.

    ``args``: what :func:`parser` read; the network may be impossible here, and all rows go to ``json`` at the end.
    """
    if args.network != "loopback" and netns.shaping() is None:
        print(f"--network {args.network}: {netns.probe().reason}", file=sys.stderr)
        return 1
    rows: list[common.Row] = []
    print(common.describe(common.machine()), flush=True)
    daemons.warmup()  # or what it says would stand in the first table
    with processes.exits_on_signals():
        for heading, found in parts:
            print(f"\n{heading}", flush=True)
            for some in found:
                rows += some
                print("\n".join(map(show, some)), flush=True)
    common.write_json(args.json, rows, command=command)
    return 0
