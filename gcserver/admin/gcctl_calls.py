"""What `gcctl` asks of a daemon: one call for each command, and how its answer looks as a table.

What may live here: requests from options, connections, the table of calls. What may not: the command line
(`gcctl_parser.py`), how tables look (`tables.py`, `plan_tables.py`), traces (`trace_command.py`), what a failure means
(`gcctl.py`).

``options`` are those of the command line, with ``timeout`` (seconds) and ``job`` settled.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# gRPC's own lines on stderr say nothing that gcctl does not say better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message import Message

from gcproto import admin_pb2 as pb
from gcproto import admin_pb2_grpc as pb_grpc
from gcserver.admin import gcctl_tls, plan_tables, tables, trace_command
from gcserver.admin.access import Paths
from gcserver.admin.gcctl_settings import SettingError
from gcserver.admin.gcctl_streams import MOST_OF_MESSAGE

#: A proxy named in the environment is for the web, not for the daemon next door.
SETTINGS: Final = (("grpc.max_receive_message_length", MOST_OF_MESSAGE), ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True, slots=True)
class Command:
    """``answer``: the message that ``ask`` returns. ``show``: it as a table, from what `convert.plain` makes of it."""

    answer: type[Message]
    ask: Callable[[Any, argparse.Namespace], Message]
    show: Callable[[dict[str, Any]], str]


def connect(address: str, use: Paths | None, *more: tuple[str, int]) -> Any:
    """A channel to a daemon, to be closed. ``more``: settings of gRPC. Raises TlsRefused."""
    settings = [*SETTINGS, *more]
    if use is None:
        return grpc.insecure_channel(address, options=settings)
    return grpc.secure_channel(address, gcctl_tls.credentials(use), options=settings)


def ask(address: str, use: Paths | None, command: str, options: argparse.Namespace) -> Message:
    """The answer to a command of COMMANDS. Raises grpc.RpcError, TlsRefused and SettingError."""
    with connect(address, use) as channel:
        try:
            return COMMANDS[command].ask(pb_grpc.AdminServiceStub(channel), options)
        except UnicodeEncodeError as error:  # bytes of the command line that are no letters
            raise SettingError(f"expected text in UTF-8, got {error.object!r}") from None


def _status(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.GetStatus(pb.GetStatusRequest(), timeout=options.timeout))


def _peers(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.ListPeers(pb.ListPeersRequest(), timeout=options.timeout))


def _jobs(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.ListJobs(pb.ListJobsRequest(), timeout=options.timeout))


def _tensors(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.ListTensorsRequest(job=options.job, domain=options.domain, pattern=options.pattern)
    return _message(stub.ListTensors(request, timeout=options.timeout))


def _set_codec(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetCodecRequest(job=options.job, pattern=options.pattern, codec=options.spec)
    return _message(stub.SetCodec(request, timeout=options.timeout))


def _plan(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.GetPlanRequest(job=options.job, timeline=options.timeline is not None)
    return _message(stub.GetPlan(request, timeout=options.timeout))


def _set_plan(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetPlanRequest(
        job=options.job,
        rules=[*options.file, *options.rules],
        replace=options.replace,
        mode=options.mode,
        quality=options.quality,
    )
    return _message(stub.SetPlan(request, timeout=options.timeout))


def _replan(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.Replan(pb.ReplanRequest(job=options.job), timeout=options.timeout))


def _set_controller(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.SetControllerRequest(
        job=options.job, controller=options.controller, parameters=dict(options.parameters)
    )
    return _message(stub.SetController(request, timeout=options.timeout))


def _profile(stub: Any, options: argparse.Namespace) -> Message:
    return _message(stub.GetProfile(pb.GetProfileRequest(job=options.job), timeout=options.timeout))


def _advise(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.AdviseRequest(job=options.job, bandwidths=options.bandwidths)
    return _message(stub.Advise(request, timeout=options.timeout))


def _drain(stub: Any, options: argparse.Namespace) -> Message:
    request = pb.DrainRequest(timeout_seconds=options.within, reason=options.reason)
    return _message(stub.Drain(request, timeout=options.timeout))


def _message(answer: Any) -> Message:
    assert isinstance(answer, Message)
    return answer


def _changed(answer: dict[str, Any]) -> str:
    version, message = answer["plan_version"], tables.clean(answer["message"])
    # what the planner says, and what is said of one of several requests, names the plan itself
    return message if not version or message.startswith("plan ") else f"plan {version} {message}"


def _draining(answer: dict[str, Any]) -> str:
    return f"{tables.clean(answer['message'])} ({answer['jobs_running']} running)"


COMMANDS: Final[dict[str, Command]] = {
    "status": Command(pb.GetStatusResponse, _status, tables.status),
    "peers": Command(pb.ListPeersResponse, _peers, tables.peers),
    "jobs": Command(pb.ListJobsResponse, _jobs, tables.jobs),
    "tensors": Command(pb.ListTensorsResponse, _tensors, tables.tensors),
    "set-codec": Command(pb.SetCodecResponse, _set_codec, _changed),
    "plan": Command(pb.GetPlanResponse, _plan, plan_tables.plan),
    "set-plan": Command(pb.SetPlanResponse, _set_plan, _changed),
    "replan": Command(pb.ReplanResponse, _replan, _changed),
    "set-controller": Command(pb.SetControllerResponse, _set_controller, _changed),
    "profile": Command(pb.GetProfileResponse, _profile, plan_tables.profile),
    "advise": Command(pb.AdviseResponse, _advise, plan_tables.advice),
    "trace start": Command(pb.StartTraceResponse, trace_command.start, trace_command.done),
    "trace stop": Command(pb.StopTraceResponse, trace_command.stop, trace_command.shown),
    "drain": Command(pb.DrainResponse, _drain, _draining),
}
