"""Stands before every method: may the caller do this, what is written down of it, how does it end?

What may live here: refusing calls by role, the audit log's records, errors as statuses, for all services of the server.
What may not: who the caller is (`callers.py`), which method needs which role (`roles.py`), the log's file
(`audit_log.py`).
"""

from __future__ import annotations

import datetime as dt
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf import json_format

from gcserver.admin import roles
from gcserver.admin.audit_log import AuditLog, bounded
from gcserver.admin.callers import Caller, caller
from gcserver.admin.handshakes import Handshakes
from gcserver.admin.source import AdminError, ErrorKind
from gcserver.admin.statuses import abort, code_name

#: kind of error that a refused call is counted as
DENIED: Final = "admin_denied"
_HANDLERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


#: refusals after which what was asked for may have happened all the same
_UNKNOWN: Final = (ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE, ErrorKind.INTERNAL)
log = logging.getLogger("gcserver.admin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call, for the audit log."""

    outcome: str
    status: str
    message: str


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Guard(grpc.aio.ServerInterceptor):
    """``tls``: callers are known by their certificates; without it all may do everything (`service.py` says when).

    ``path``: of the Unix socket that is served, "" for TCP. ``count`` hears of each refused call, ``handshakes`` of
    each peer that calls.
    """

    def __init__(
        self,
        tls: bool,
        audit: AuditLog | None,
        count: Callable[[str], None],
        handshakes: Handshakes,
        now: Callable[[], dt.datetime] = _now,
        path: str = "",
    ) -> None:
        self._tls, self._audit, self._count, self._path = tls, audit, count, path
        self._handshakes, self._now = handshakes, now

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC says so
        method = details.method
        kind = (handler.request_streaming, handler.response_streaming)
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if kind == (False, False):
            guarded = self._answering(method, inner)
        elif inspect.isasyncgenfunction(inner):
            guarded = self._yielding(method, inner)
        else:
            guarded = self._writing(method, inner)
        return _HANDLERS[kind](guarded, handler.request_deserializer, handler.response_serializer)

    # ------------------------------------------------------------------------------- kinds of methods
    def _answering(self, method: str, inner: Any) -> Any:
        """One request, one answer. What a change came to is written down before the caller hears of it."""
        written = roles.METHODS.get(method) == roles.OPERATOR and self._audit is not None

        async def guarded(request: Any, context: Any) -> Any:
            who = self._caller(context)
            # Now: a caller that does not wait for its answer is not to be found any more.
            name = who.who if written else ""
            error = self._refusal(method, who)
            outcome = Outcome("unknown", "CANCELLED", "the caller did not wait for the answer")
            try:
                if error is None:
                    answer, error = await _ask(inner(request, context))
                if error is None:
                    outcome = Outcome("done", "OK", getattr(answer, "message", ""))
                else:
                    said = "unknown" if error.kind in _UNKNOWN else "refused"
                    outcome = Outcome(said, code_name(error.kind), error.message)
            finally:
                # Also for a caller that went away: what it asked for may have happened.
                if written:
                    await self._write(method, who, name, request, outcome)
            if error is not None:
                await abort(context, error)
            return answer

        return guarded

    def _writing(self, method: str, inner: Any) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            await self._admit(method, context)
            try:
                _, error = await _ask(inner(request, context))
            except grpc.aio.InternalError:
                return  # nothing can be sent any more: the caller went away in the midst of it
            if error is not None:
                await abort(context, error)

        return guarded

    def _yielding(self, method: str, inner: Any) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            await self._admit(method, context)
            try:
                async for answer in inner(request, context):
                    yield answer
            except AdminError as error:
                await abort(context, error)

        return guarded

    # ------------------------------------------------------------------------------------- who and what
    def _caller(self, context: Any) -> Caller:
        who = caller(context, self._tls, self._path)
        self._handshakes.called(who.peer)
        return who

    async def _admit(self, method: str, context: Any) -> None:
        refusal = self._refusal(method, self._caller(context))
        if refusal is not None:
            await abort(context, refusal)

    def _refusal(self, method: str, who: Caller) -> AdminError | None:
        """Why the call is refused; None where it is not."""
        needed = roles.METHODS.get(method)
        name = method.rpartition("/")[2]
        error = None
        if needed is None:
            error = AdminError(ErrorKind.DENIED, f"{name}: nobody may call it; it is in no role's list")
        elif who.expired(self._now()):
            text = f"the certificate {who.name!r} expired on {who.until:%Y-%m-%d %H:%M} UTC; connect with a new one"
            error = AdminError(ErrorKind.UNAUTHENTICATED, text)
        elif not roles.suffices(who.role, needed):
            has = f"the role {who.role}" if who.role else "no role"
            error = AdminError(
                ErrorKind.DENIED, f"{name} needs the role {needed}; the certificate {who.name!r} has {has}"
            )
        if error is not None:
            self._count(DENIED)
        return error

    async def _write(self, method: str, who: Caller, name: str, request: Any, outcome: Outcome) -> None:
        assert self._audit is not None
        arguments = json_format.MessageToDict(request, preserving_proto_field_name=True)
        await self._audit.append({
            "time": self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "who": name,
            "role": who.role,
            "peer": who.peer,
            "method": method.rpartition("/")[2],
            "arguments": bounded(arguments),
            "outcome": outcome.outcome,
            "status": outcome.status,
            "message": bounded(outcome.message),
        })  # fmt: skip


async def _ask(work: Awaitable[Any]) -> tuple[Any, AdminError | None]:
    """The answer, or why there is none."""
    try:
        return await work, None
    except AdminError as error:
        return None, error
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # of a service that is not ours, which has said itself what is wrong; or of gRPC
    except Exception as error:  # a defect: the operator gets a status, the daemon's log the traceback
        log.exception("an admin request failed")
        text = f"{type(error).__name__}: {error}; the daemon's log has the traceback"
        return None, AdminError(ErrorKind.INTERNAL, text)
