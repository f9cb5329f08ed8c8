"""A service whose every answer is full of what no daemon says: sequences that drive terminals, numbers beyond all
bounds, endless streams.

What may live here: the service. What may not: what is asked of it, and what must come of that.
"""

from __future__ import annotations

import concurrent.futures
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gcproto import admin_pb2 as pb

#: clears a screen, sets a window's title, the same in one byte, turns the direction of writing round; and letters that
#: those who draw pictures take for formulas
EVIL: Final = "\x1b[2J\x1b]0;title\x07\x9b31m\u202ex\ty $\\frac$"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["AdminService"]
_WIDTHS: Final = {
    FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.CPPTYPE_INT32: -(1 << 31),
    FieldDescriptor.CPPTYPE_INT64: -(1 << 63),
    FieldDescriptor.CPPTYPE_ENUM: 99,
    FieldDescriptor.CPPTYPE_BOOL: True,
}

Answer = Callable[[str, Any, grpc.ServicerContext], Any]


def drives(text: str) -> list[str]:
    """Characters in a text that a terminal would obey instead of showing, line ends aside."""
    return [c for c in text if unicodedata.category(c)[0] == "C" and c != "\n"]


def filled(kind: type[Message], number: float) -> Message:
    """A message with something in every field, as far down as there are any."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(made, field.name)[EVIL] = _value(field.message_type.fields_by_name["value"], number)
        elif field.is_repeated:
            getattr(made, field.name).extend([_value(field, number)] * 2)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(_value(field, number))
        else:
            setattr(made, field.name, _value(field, number))
    return made


def _value(field: FieldDescriptor, number: float) -> Any:
    if field.message_type is not None:
        return filled(GetMessageClass(field.message_type), number)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return EVIL
    return _WIDTHS.get(field.cpp_type, number)


@contextmanager
def hostile(answer: Answer) -> Iterator[str]:
    """The address of a service that answers a call of a method with what ``answer`` makes of its name, the class of its
    answer and the call's context: a message, or an iterator of them where it is a stream."""

    def handle(_: object, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = _SERVICE.methods_by_name.get(details.method.rpartition("/")[2])
        if method is None:
            return None
        kind = GetMessageClass(method.output_type)

        def serve(_: bytes, context: grpc.ServicerContext) -> Any:
            return answer(method.name, kind, context)

        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        return make(serve, response_serializer=lambda message: message.SerializeToString())

    handler = type("Handler", (grpc.GenericRpcHandler,), {"service": handle})()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[handler], options=[("grpc.max_send_message_length", -1)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
