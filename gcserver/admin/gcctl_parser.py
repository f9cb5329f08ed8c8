"""The command line of `gcctl`: its commands, their options and arguments.

What may live here: what may be written, and what `--help`, completion and docs/gcctl.md say of it. What may not: what
commands do, imports that cost time: a shell asks for completions at every press of a key.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from gcproto.modes import MODES, QUALITIES
from gcserver import __version__, commandline, values
from gcserver.admin import contexts, drawing, top
from gcserver.admin.exits import CtlError, Exit
from gcserver.admin.gcctl_output import note
from gcserver.admin.gcctl_settings import ADDRESS_VARIABLE, CONTEXT_VARIABLE, DEFAULT_ADDRESS, TLS
from gcserver.admin.logs import LEVELS
from gcserver.admin.plan_arguments import RULE, bandwidth, parameter, rule, rules_in_file

T = TypeVar("T")

SHELLS: Final = ("bash", "zsh", "fish")


class Parser(commandline.Parser):
    """Says what is wrong as gcctl says everything: it may quote control characters, and have no stderr."""

    def complain(self, line: str) -> None:
        note(line)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # What a command does not know comes back to the parser of all of them, which could name no command's help.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _read(read: Callable[[str], T]) -> Callable[[str], T]:
    """What argparse can use of a reader that raises ValueError: its words are part of what is said."""

    def reader(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; got {text!r}") from None

    return reader


def _time(text: str) -> float:
    seconds = values.read_duration(text)
    if seconds > contexts.LONGEST:
        raise ValueError(f"expected at most {values.human_duration(contexts.LONGEST)}")
    return seconds


def _pause(text: str) -> float:
    seconds = _time(text)
    if seconds < top.SHORTEST:
        raise ValueError(f"expected at least {values.human_duration(top.SHORTEST)}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError("expected a whole number of at most nine digits")
    return int(text)


def _url(text: str) -> str:
    from urllib.parse import urlsplit  # late: a shell that completes needs none

    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not text.isprintable() or " " in text:
        raise ValueError("expected http:// or https:// and a host, such as http://collector:4318/v1/traces")
    return text


_duration: Final = _read(_time)


def _names(text: str) -> list[str]:
    return [] if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def parser() -> Parser:
    # The same options before and after the command; SUPPRESS keeps the second parse from undoing the first.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--address", type=_read(contexts.read_address), metavar="HOST:PORT",
        help=f"node.admin of the daemon, or unix:/path (variable {ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )  # fmt: skip
    what = "context to take address, files and defaults from, or none"
    said = f"{what} (variable {CONTEXT_VARIABLE}, else the current one)"
    _completed(common.add_argument("--context", metavar="NAME", help=said))
    common.add_argument("--json", action="store_true", help="the answer as JSON: every field, numbers as numbers")
    common.add_argument(
        "--timeout", type=_read(contexts.read_timeout), metavar="TIME",
        help="how long the daemon may take (10s; 60s where a job has to make steps, is planned for or traced)",
    )  # fmt: skip
    for option, variable, _, about in TLS:
        common.add_argument(option, metavar="FILE", help=f"{about} (variable {variable})")
    whole = Parser(
        prog="gcctl", parents=[common], description="look at a gradcomm daemon and steer it",
        epilog="exit status: " + "; ".join(f"{e.value} {e.about}" for e in Exit),
    )  # fmt: skip
    whole.add_argument("--version", action="version", version=f"gcctl {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return _add(commands, common, name, about)

    add("status", "the daemon: its state, its lanes, what went wrong so far")
    add("peers", "the other nodes as this one sees them")
    add("jobs", "training runs, their process groups, and who is waited for")
    watched = add("top", "this node, jobs and who is waited for, links, lanes, tensors, looked at again and again")
    watched.add_argument("--once", action="store_true", help="one look, then exit")
    watched.add_argument(
        "--every", type=_read(_pause), default=top.EVERY, metavar="TIME", help="between looks (default 2s)"
    )
    tensors = add("tensors", "a job's tensors: codec, bytes before and after, residual")
    _add_job(tensors)
    tensors.add_argument("--domain", default="", help="label or number of one process group (default: all)")
    tensors.add_argument("--pattern", default="", metavar="GLOB", help="names of tensors (default: all)")
    codec = add("set-codec", "change the codec of a running job, on every node at the same step")
    _add_job(codec)
    codec.add_argument("--pattern", default="*", metavar="GLOB", help="names of tensors (default: all)")
    codec.add_argument("spec", metavar="SPEC", help='such as none, fp16 or "topk(ratio=0.01)"')
    shown = add("plan", "which codec and scheme everything in a job uses, by which rule, and why")
    _add_job(shown)
    shown.add_argument(
        "--timeline", type=drawing.target, metavar="FILE",
        help="draw a step as predicted beside the same as measured: FILE.html, FILE.png, or FILE.json (Chrome trace)",
    )  # fmt: skip
    plan = add("set-plan", "give a running job rules, all at once on every node; the last one that matches wins")
    _add_job(plan)
    plan.add_argument("--mode", choices=MODES, default="", help="who makes this job's plans from now on")
    plan.add_argument("--quality", choices=QUALITIES, default="", help="what automatic plans may lose")
    plan.add_argument("--replace", action="store_true", help="these rules and no others (alone: back to the defaults)")
    plan.add_argument(
        "--file", type=rules_in_file, default=[], metavar="FILE",
        help="JSON list of {pattern, codec, scheme}; rules on the command line come after them",
    )  # fmt: skip
    plan.add_argument(
        "rules", nargs="*", type=rule, metavar=RULE, help='such as "*=fp16" or "layer.*=topk(ratio=0.01)@all"'
    )
    _add_job(add("replan", "make a plan of what has been measured, now"))
    controller = add("set-controller", "adapt a job's levels from step to step, on every node by its own delays")
    _add_job(controller)
    controller.add_argument("controller", metavar="NAME", help="dc2-da1 to dc2-da5, or none")
    controller.add_argument(
        "parameters", nargs="*", type=parameter, metavar="NAME=VALUE", help="such as k_min=0.001 k_max=0.1"
    )
    _add_job(add("profile", "what was measured of a job: gradients, codecs, link, steps"))
    advise = add("advise", "expected step time by plan and bandwidth, and whether compression pays at all")
    _add_job(advise)
    advise.add_argument(
        "bandwidths", nargs="*", type=bandwidth, metavar="RATE", help="such as 100mbit 1gbit (default: usual ones)"
    )
    logs = add("logs", "what the daemon and its lanes logged last")
    logs.add_argument("--follow", action="store_true", help="go on with what comes, until interrupted")
    logs.add_argument(
        "--since", type=_duration, default=0.0, metavar="TIME", help="of the last 10m (default: all it has)"
    )
    logs.add_argument("--level", choices=LEVELS, default=LEVELS[0], help="this and what matters more (default: all)")
    about = "record steps on all nodes, for Perfetto"
    traced = commands.add_parser("trace", help=about, description=about)
    _add_traces(traced.add_subparsers(required=True, metavar="COMMAND"), common)
    drain = add("drain", "take no new jobs, let running ones end, then exit")
    drain.add_argument("--within", type=_duration, default=0.0, metavar="TIME", help="how long jobs may still take")
    drain.add_argument("--reason", default="", help="shown in the daemon's log and to workers that want to join")
    named = commands.add_parser("context", help="daemons by name", description="daemons by name")
    contexts_of = named.add_subparsers(required=True, metavar="COMMAND")
    _add(contexts_of, common, "context list", "the contexts there are, and which is the current one")
    shown = _add(contexts_of, common, "context show", "what one context says")
    _completed(shown.add_argument("name", nargs="?", default="", metavar="NAME", help="(default: the one in use)"))
    used = _add(contexts_of, common, "context use", "make a context the current one")
    _completed(used.add_argument("name", metavar="NAME", help=f"its name, or {contexts.NONE}"))
    completion = add("completion", "the script that makes a shell complete gcctl's commands and options")
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    return whole


def _add(commands: Any, common: argparse.ArgumentParser, name: str, about: str) -> argparse.ArgumentParser:
    """``name`` is the whole of it, such as "context list", and what ``options.command`` will be."""
    word = name.rpartition(" ")[2]
    made: argparse.ArgumentParser = commands.add_parser(word, parents=[common], help=about, description=about)
    made.set_defaults(command=name)
    return made


def _add_traces(traces: Any, common: argparse.ArgumentParser) -> None:
    start = _add(traces, common, "trace start", "begin to record steps as spans, on this node and others")
    start.add_argument("--job", default="", help="label or id (default: the context's, else all)")
    start.add_argument("--steps", type=_read(_count), default=0, metavar="N", help="whole steps of each process group")
    start.add_argument(
        "--seconds", type=_duration, default=0.0, metavar="TIME", help="how long at most (default 60s, at most 10min)"
    )
    start.add_argument("--nodes", type=_names, default=[], metavar="A,B", help="besides this one (default: all)")
    about = "end it on all nodes and write what they recorded, for https://ui.perfetto.dev or Chrome"
    stop = _add(traces, common, "trace stop", about)
    stop.add_argument("--out", type=Path, metavar="FILE.json", help="(default: only say what there is)")
    export = _add(traces, common, "trace export", "send a trace to a collector of OpenTelemetry's; no daemon is asked")
    export.add_argument("file", type=Path, metavar="FILE.json", help="what `trace stop --out` wrote")
    export.add_argument(
        "--otlp", type=_read(_url), required=True, metavar="URL", help="such as http://collector:4318/v1/traces"
    )


def _completed(action: argparse.Action) -> None:
    """What a shell offers for it are the names of contexts."""
    action.completer = _context_names  # type: ignore[attr-defined]


def _context_names(**_: object) -> list[str]:
    try:
        return [*contexts.load(os.environ).known, contexts.NONE]
    except CtlError:
        return []  # the command itself will say what is wrong


def commands_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name such as "context list", parser) of every command that can be run, in the order in which they were added."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, sub in action.choices.items():
            yield from commands_of(sub, f"{name} {word}".strip())


def _add_job(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--job", default="", help="label or id (default: the context's, else the only one)")
