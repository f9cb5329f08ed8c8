"""The command `gcctl`: ask a daemon what it is doing, and steer it.

What may live here: arguments, one call, what is printed, exit statuses. What may not: how answers look as tables
(`tables.py`, `plan_tables.py`) or drawn (`drawing.py`), how rules are written (`plan_arguments.py`), certificates
(`gcctl_tls.py`), anything the daemon should do itself.

Exit status: 0 done, 1 the daemon refused or cannot be reached, 2 the command line is wrong, 130 interrupted. Errors are
one line on stderr; with `--json` stdout holds the answer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcproto.modes import MODES, QUALITIES
from gcserver import __version__, values
from gcserver.admin import convert, drawing, gcctl_tls, plan_tables, tables, top, trace_command
from gcserver.admin.access import Paths
from gcserver.admin.plan_arguments import RULE, bandwidth, parameter, rule, rules_in_file

DEFAULT_ADDRESS = "127.0.0.1:7460"
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
#: commands that wait until the job has made a step
CHANGES = ("set-codec", "set-plan", "set-controller", "replan")

Call = Callable[[pb_grpc.AdminServiceStub, argparse.Namespace], Message]


def _duration(text: str) -> float:
    try:
        return values.read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; got {text!r}") from None


def _address(text: str) -> str:
    if text.startswith("unix:"):
        return text
    try:
        return values.read_endpoint(text, "host:port or unix:/path").endpoint
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; got {text!r}") from None


def parser() -> argparse.ArgumentParser:
    # The same options before and after the command; SUPPRESS keeps the second parse from undoing the first.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--address", type=_address, metavar="HOST:PORT",
        help=f"node.admin of the daemon, or unix:/path (variable GC_NODE_ADMIN, else {DEFAULT_ADDRESS})",
    )  # fmt: skip
    common.add_argument("--json", action="store_true", help="the answer as JSON: every field, numbers as numbers")
    common.add_argument(
        "--timeout", type=_duration, metavar="TIME",
        help="how long the daemon may take (10s; 60s where a job has to make steps or is planned for)",
    )  # fmt: skip
    gcctl_tls.add_options(common)
    whole = argparse.ArgumentParser(
        prog="gcctl", parents=[common], description="look at a gradcomm daemon and steer it"
    )
    whole.add_argument("--version", action="version", version=f"gcctl {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=about, description=about)

    add("status", "the daemon: its state, its lanes, what went wrong so far")
    add("peers", "the other nodes as this one sees them")
    add("jobs", "training runs, their process groups, and who is waited for")
    watched = add("top", "who is waited for, since when and for what, looked at again and again")
    watched.add_argument("--once", action="store_true", help="one look, then exit")
    watched.add_argument(
        "--every", type=_duration, default=top.EVERY, metavar="TIME", help="between looks (default 2s)"
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
    trace_command.add_options(add("trace", "record the steps of jobs on all nodes, for Perfetto"), common)
    drain = add("drain", "take no new jobs, let running ones end, then exit")
    drain.add_argument("--within", type=_duration, default=0.0, metavar="TIME", help="how long jobs may still take")
    drain.add_argument("--reason", default="", help="shown in the daemon's log and to workers that want to join")
    return whole


def _add_job(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--job", default="", help="label or id (default: the only one)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (argparse itself exits with 2)."""
    options = parser().parse_args(argv)
    try:
        address = getattr(options, "address", None) or _address(os.environ.get("GC_NODE_ADMIN") or DEFAULT_ADDRESS)
    except argparse.ArgumentTypeError as error:
        return _complain(f"GC_NODE_ADMIN: {error}", USAGE)
    try:
        use = gcctl_tls.files(options, os.environ, address)
        if options.command == "top":
            return _top(address, use, options)
        call, show = _COMMANDS[" ".join(filter(None, (options.command, getattr(options, "action", ""))))]
        answer = _ask(address, use, call, options)
    except gcctl_tls.TlsUsage as error:
        return _complain(str(error), USAGE)
    except (gcctl_tls.TlsRefused, trace_command.TraceError) as error:
        return _complain(str(error), FAILED)
    except grpc.RpcError as error:
        return _complain(_explain(error, address, use, options), FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    plain = convert.plain(answer)
    if getattr(options, "timeline", None):
        try:
            drawing.draw(plain, options.timeline)
        except drawing.DrawingError as error:
            return _complain(str(error), FAILED)
    text = json.dumps(plain, indent=2, ensure_ascii=False) if getattr(options, "json", False) else show(plain)
    if getattr(options, "timeline", None) and not getattr(options, "json", False):
        text += f"\n\ntimeline written to {options.timeline}"
    _print(text)
    return OK


def _print(text: str) -> bool:
    """Whether anybody reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # the reader (head, less) has seen enough; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _top(address: str, use: Paths | None, options: argparse.Namespace) -> int:
    def look() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        status, peers, jobs = (convert.plain(_ask(address, use, call, options)) for call in (_status, _peers, _jobs))
        return status, peers, jobs

    as_json = getattr(options, "json", False)
    clear = sys.stdout.isatty() and not as_json
    top.run(look, _print, options.every, options.once, as_json, clear)
    return OK


def _complain(text: str, status: int) -> int:
    print("gcctl:", " ".join(text.split()), file=sys.stderr, flush=True)
    return status


def _ask(address: str, use: Paths | None, call: Call, options: argparse.Namespace) -> Message:
    # A proxy named in the environment is for the web, not for the daemon next door.
    settings = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    if use is None:
        made = grpc.insecure_channel(address, options=settings)
    else:
        made = grpc.secure_channel(address, gcctl_tls.credentials(use), options=settings)
    with made as channel:
        return call(pb_grpc.AdminServiceStub(channel), options)


def _explain(error: Any, address: str, use: Paths | None, options: argparse.Namespace) -> str:
    """One line that says what to do."""
    code, details = error.code(), error.details() or ""
    if rpc_status.from_call(error) is not None:
        return details  # the daemon's own words; without a status it is gRPC that speaks
    if code is grpc.StatusCode.UNAVAILABLE:
        why = "" if address.startswith("unix:") else gcctl_tls.why_not(address, use)
        return why or (
            f"no daemon answers at {address}: check that gcserver runs there (`gcserver doctor`), that its node.admin "
            "is this address, and name another by --address or GC_NODE_ADMIN"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} does not know this command: another service, or an older daemon ({details})"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        wait = values.human_duration(_timeout(options))
        if options.command in CHANGES:
            return (
                f"{address}: the job did not reach the step of the change within {wait}; it may still take effect "
                "(`gcctl plan` shows what is in force)"
            )
        return f"{address} did not answer within {wait}; --timeout allows more"
    return details or code.name


def _timeout(options: argparse.Namespace) -> float:
    usual = 60.0 if options.command in (*CHANGES, "advise", "trace") else 10.0
    return float(getattr(options, "timeout", usual))


def _status(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.GetStatus(pb.GetStatusRequest(), timeout=_timeout(options)))


def _peers(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.ListPeers(pb.ListPeersRequest(), timeout=_timeout(options)))


def _jobs(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.ListJobs(pb.ListJobsRequest(), timeout=_timeout(options)))


def _tensors(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.ListTensorsRequest(job=options.job, domain=options.domain, pattern=options.pattern)
    return _message(stub.ListTensors(request, timeout=_timeout(options)))


def _set_codec(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetCodecRequest(job=options.job, pattern=options.pattern, codec=options.spec)
    return _message(stub.SetCodec(request, timeout=_timeout(options)))


def _plan(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.GetPlanRequest(job=options.job, timeline=options.timeline is not None)
    return _message(stub.GetPlan(request, timeout=_timeout(options)))


def _set_plan(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetPlanRequest(
        job=options.job,
        rules=[*options.file, *options.rules],
        replace=options.replace,
        mode=options.mode,
        quality=options.quality,
    )
    return _message(stub.SetPlan(request, timeout=_timeout(options)))


def _replan(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.Replan(pb.ReplanRequest(job=options.job), timeout=_timeout(options)))


def _set_controller(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetControllerRequest(
        job=options.job, controller=options.controller, parameters=dict(options.parameters)
    )
    return _message(stub.SetController(request, timeout=_timeout(options)))


def _profile(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.GetProfile(pb.GetProfileRequest(job=options.job), timeout=_timeout(options)))


def _advise(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.AdviseRequest(job=options.job, bandwidths=options.bandwidths)
    return _message(stub.Advise(request, timeout=_timeout(options)))


def _drain(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.DrainRequest(timeout_seconds=options.within, reason=options.reason)
    return _message(stub.Drain(request, timeout=_timeout(options)))


def _message(answer: Any) -> Message:
    assert isinstance(answer, Message)
    return answer


def _changed(answer: dict[str, Any]) -> str:
    version, message = answer["plan_version"], str(answer["message"])
    # what the planner says, and what is said of one of several requests, names the plan itself
    return message if not version or message.startswith("plan ") else f"plan {version} {message}"


def _draining(answer: dict[str, Any]) -> str:
    return f"{answer['message']} ({answer['jobs_running']} running)"


_COMMANDS: dict[str, tuple[Call, Callable[[dict[str, Any]], str]]] = {
    "status": (_status, tables.status),
    "peers": (_peers, tables.peers),
    "jobs": (_jobs, tables.jobs),
    "tensors": (_tensors, tables.tensors),
    "set-codec": (_set_codec, _changed),
    "plan": (_plan, plan_tables.plan),
    "set-plan": (_set_plan, _changed),
    "replan": (_replan, _changed),
    "set-controller": (_set_controller, _changed),
    "profile": (_profile, plan_tables.profile),
    "advise": (_advise, plan_tables.advice),
    "drain": (_drain, _draining),
    **trace_command.COMMANDS,
}

if __name__ == "__main__":
    sys.exit(main())
