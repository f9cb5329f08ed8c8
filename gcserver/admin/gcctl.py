"""The command `gcctl`: ask a daemon what it is doing, and steer it.

What may live here: from a command line to what is printed and to an exit status; what a failed call means. What may
not: which options there are (`gcctl_parser.py`) and what they come to (`gcctl_settings.py`), single calls
(`gcctl_calls.py`, `gcctl_logs.py`, `trace_command.py`), how answers look (`tables.py`, `plan_tables.py`, `drawing.py`),
writing (`gcctl_output.py`), anything the daemon should do itself.

Exit statuses are those of `exits.py`. Errors are one line on stderr, also those that nobody foresaw; with `--json`
stdout holds the answer alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gcserver import values
from gcserver.admin import gcctl_contexts, top
from gcserver.admin.exits import CtlError, Exit
from gcserver.admin.gcctl_output import is_terminal, note, show
from gcserver.admin.gcctl_parser import parser
from gcserver.admin.gcctl_settings import ADDRESS_VARIABLE, LONG_TIMEOUT, USUAL_TIMEOUT, Settings, settle

if TYPE_CHECKING:
    from gcserver.admin.access import Paths

#: commands that wait until the job has made a step
CHANGES = ("set-codec", "set-plan", "set-controller", "replan")
#: commands that may take long: these, and those that measure or ask other nodes
LONG = (*CHANGES, "advise", "trace start", "trace stop")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (what is wrong with `argv` itself exits, with 2)."""
    try:
        return _run(argv)
    except CtlError as error:
        return _complain(str(error), error.status)
    except KeyboardInterrupt:
        return _complain("interrupted", Exit.INTERRUPTED)
    except Exception as error:
        if os.environ.get("GC_LOG_LEVEL") == "debug":
            traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        return _complain(f"{said} (a defect; GC_LOG_LEVEL=debug shows where)", Exit.FAILED)


def _run(argv: Sequence[str] | None) -> Exit:
    whole = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could be written next; this ends the process
        import argcomplete

        argcomplete.autocomplete(whole, always_complete_options=False)
    options = whole.parse_args(argv)
    options.json = getattr(options, "json", False)
    if options.command == "completion":
        show(gcctl_contexts.completion(options.shell, options.json))
    elif options.command.startswith("context "):
        show(gcctl_contexts.run(options, os.environ))
    elif options.command == "trace export":
        from gcserver.admin import trace_command

        show(trace_command.export(options))
    else:
        return _call(options, settle(options, os.environ))
    return Exit.OK


def _call(options: argparse.Namespace, settings: Settings) -> Exit:
    """A command that asks a daemon. Raises CtlError."""
    # Imported late: gRPC takes longer than all the rest of a command, and shells ask for completions.
    import grpc

    from gcserver.admin import gcctl_tls

    traced = getattr(options, "timeline", None) is not None
    usual = LONG_TIMEOUT if traced or options.command in LONG else USUAL_TIMEOUT
    options.timeout, options.job = settings.timeout or usual, settings.job
    use = gcctl_tls.files(settings.tls, settings.address)
    try:
        if options.command == "top":
            _top(settings.address, use, options)
        elif options.command == "logs":
            from gcserver.admin import gcctl_logs

            gcctl_logs.run(settings.address, use, options, show, note)
        else:
            _ask(settings.address, use, options)
    except grpc.RpcError as error:
        return _complain(*_explain(error, settings.address, use, options))
    return Exit.OK


def _ask(address: str, use: Paths | None, options: argparse.Namespace) -> None:
    from gcserver.admin import convert, drawing, gcctl_calls, jsonform, tables

    plain = convert.plain(gcctl_calls.ask(address, use, options.command, options))
    timeline = getattr(options, "timeline", None)
    if timeline:
        drawing.draw(plain, timeline)
    text = jsonform.text(plain, indent=2) if options.json else gcctl_calls.COMMANDS[options.command].show(plain)
    if timeline and not options.json:
        text += f"\n\ntimeline written to {tables.clean(str(timeline))}"
    show(text)


def _top(address: str, use: Paths | None, options: argparse.Namespace) -> None:
    import heapq

    import grpc

    from gcserver.admin import convert, gcctl_calls

    def look() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        status, peers, jobs = (
            convert.plain(gcctl_calls.ask(address, use, command, options)) for command in ("status", "peers", "jobs")
        )
        return status, peers, jobs

    def largest(job: str, most: int) -> list[dict[str, Any]]:
        within = min(options.timeout, top.TENSORS_WITHIN)
        of_job = argparse.Namespace(job=job, domain="", pattern="", timeout=within)
        try:
            answer: Any = gcctl_calls.ask(address, use, "tensors", of_job)
        except grpc.RpcError:
            return []  # it ended meanwhile, or a lane does not answer: the next look says what is wrong
        return [convert.plain(t) for t in heapq.nlargest(most, answer.tensors, key=lambda t: t.bytes_raw)]

    screen = shutil.get_terminal_size if is_terminal() and not options.json else None
    top.run(look, largest, show, options.every, options.once, options.json, screen)


def _complain(text: str, status: Exit) -> Exit:
    note(text)
    return status


def _explain(error: Any, address: str, use: Paths | None, options: argparse.Namespace) -> tuple[str, Exit]:
    """One line that says what to do, and how to end."""
    import grpc

    from gcserver.admin import gcctl_tls

    codes = grpc.StatusCode
    code, details = error.code(), error.details() or ""
    if _by_daemon(error):
        said = {
            codes.INVALID_ARGUMENT: Exit.REFUSED,
            codes.FAILED_PRECONDITION: Exit.REFUSED,
            codes.NOT_FOUND: Exit.NOT_FOUND,
            codes.PERMISSION_DENIED: Exit.DENIED,
            codes.UNAUTHENTICATED: Exit.DENIED,
            codes.DEADLINE_EXCEEDED: Exit.TIMEOUT,
            codes.UNAVAILABLE: Exit.UNAVAILABLE,
        }
        return details, said.get(code, Exit.FAILED)
    if code is codes.UNAVAILABLE:
        why = "" if address.startswith("unix:") else gcctl_tls.why_not(address, use)
        if why:
            return why, Exit.DENIED
        return (
            f"no daemon answers at {address}: check that gcserver runs there (`gcserver doctor`), that its node.admin "
            f"is this address, and name another by --address, --context or {ADDRESS_VARIABLE}"
        ), Exit.UNREACHABLE
    if code is codes.UNIMPLEMENTED:
        text = f"what answers at {address} does not know this command: another service, or an older daemon ({details})"
        return text, Exit.REFUSED
    if code is codes.DEADLINE_EXCEEDED:
        wait = values.human_duration(options.timeout)
        if options.command in CHANGES:
            return (
                f"{address}: the job did not reach the step of the change within {wait}; it may still take effect "
                "(`gcctl plan` shows what is in force)"
            ), Exit.TIMEOUT
        return f"{address} did not answer within {wait}; --timeout allows more", Exit.TIMEOUT
    return details or code.name, Exit.FAILED


def _by_daemon(error: Any) -> bool:
    """Whether these are the daemon's own words; without a status, or with one that cannot be read, gRPC's."""
    from google.protobuf.message import DecodeError
    from grpc_status import rpc_status

    try:
        return rpc_status.from_call(error) is not None
    except (DecodeError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
