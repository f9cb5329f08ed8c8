"""Refusals as gRPC statuses with details (google.rpc).

What may live here: how an `AdminError` looks on the wire. What may not: when to refuse.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from gcproto import admin_pb2 as pb
from gcserver.admin.source import AdminError, ErrorKind

SERVICE: Final[str] = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
#: Bytes of a message: it comes up to three times, once with every byte beyond ASCII as three. From 8 KiB of headers on
#: gRPC refuses some answers at random, from 16 KiB on all.
LONGEST: Final = 1024
_CODES: Final = {
    ErrorKind.INVALID: code_pb2.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: code_pb2.NOT_FOUND,
    ErrorKind.PRECONDITION: code_pb2.FAILED_PRECONDITION,
    ErrorKind.UNAVAILABLE: code_pb2.UNAVAILABLE,
    ErrorKind.DEADLINE: code_pb2.DEADLINE_EXCEEDED,
    ErrorKind.INTERNAL: code_pb2.INTERNAL,
    ErrorKind.DENIED: code_pb2.PERMISSION_DENIED,
    ErrorKind.UNAUTHENTICATED: code_pb2.UNAUTHENTICATED,
}


def rich_status(error: AdminError) -> status_pb2.Status:
    """An AdminError as google.rpc.Status. Of a long text, which quotes what was given, as much as fits beside the rest
    in what HTTP/2 has for a header."""
    message = _cut(error.message)
    info = error_details_pb2.ErrorInfo(reason=error.kind.name, domain=SERVICE)
    if error.field:
        info.metadata["field"] = error.field
    details: list[Any] = [info]
    if error.kind is ErrorKind.INVALID and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=_CODES[error.kind], message=message, details=packed)


def _cut(text: str) -> str:
    """Its beginning and its end, `LONGEST` bytes of UTF-8 altogether."""
    content = text.encode(errors="replace")  # half of a character can be quoted too
    if len(content) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{content[:half].decode(errors='ignore')} ... {content[-half:].decode(errors='ignore')}"


def code_name(kind: ErrorKind) -> str:
    """The status of a refusal of this kind, such as ``PERMISSION_DENIED``."""
    return str(code_pb2.Code.Name(_CODES[kind]))


async def abort(context: Any, error: AdminError) -> NoReturn:
    """End a call with this refusal."""
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
