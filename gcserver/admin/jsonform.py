"""What `gcctl --json` prints: as text, and as a JSON Schema that says what every command prints.

What may live here: how values look as JSON, the schema, which is made of the messages of admin.proto and of the few
answers that are none. What may not: answers themselves.

What is printed for a message has every field of it: a field that is added to admin.proto is added here, and none goes.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gcproto import admin_pb2 as pb

JSON = dict[str, Any]
_TEXT: Final[JSON] = {"type": "string"}
_INTEGERS: Final = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_SIGNED: Final = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)


def text(value: Any, indent: int | None = None) -> str:
    """JSON of an answer. A number that JSON has no word for (infinite, or none) is null. Characters that nobody sees,
    which may drive a terminal, are escaped."""
    try:
        written = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        written = json.dumps(_finite(value), indent=indent, ensure_ascii=False)
    if written.replace("\n", "").isprintable():
        return written
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in written)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def schema() -> JSON:
    """A JSON Schema with what the command ``NAME`` prints as ``#/$defs/gcctl NAME``."""
    defs: dict[str, JSON] = {f"gcctl {name}": form for name, form in _others().items()}
    for name, message in messages().items():
        defs[f"gcctl {name}"] = _reference(message)
    for message in [*messages().values(), pb.LogRecord.DESCRIPTOR]:
        _define(message, defs)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What gcctl --json prints, by command",
        "description": "Fields are added, never renamed or taken away. Words of a fixed set may get more.",
        "$defs": dict(sorted(defs.items())),
    }


def messages() -> dict[str, Descriptor]:
    """The message that a command prints, of those that print one."""
    from gcserver.admin.gcctl_calls import COMMANDS

    return {name: command.answer.DESCRIPTOR for name, command in COMMANDS.items()}


def _others() -> dict[str, JSON]:
    context = _object({
        "name": _TEXT, "address": _TEXT, "tls_ca": _TEXT, "tls_cert": _TEXT, "tls_key": _TEXT,
        "timeout_seconds": {"type": ["number", "null"]}, "job": _TEXT,
    })  # fmt: skip
    parts = {
        name: _field(message.fields_by_name[name])
        for name, message in (("peers", pb.ListPeersResponse.DESCRIPTOR), ("jobs", pb.ListJobsResponse.DESCRIPTOR))
    }
    look = _object({"status": _reference(pb.GetStatusResponse.DESCRIPTOR), **parts})
    found = {"file": _TEXT, "current": _TEXT}
    return {
        "top": {**look, "description": "Each look is a line of its own."},
        "logs": {**_reference(pb.LogRecord.DESCRIPTOR), "description": "Each record is a line of its own."},
        "context list": _object({**found, "in_use": _TEXT, "contexts": {"type": "array", "items": context}}),
        "context show": context,
        "context use": _object(found),
        "trace export": _object({"file": _TEXT, "url": _TEXT, "spans": {"type": "integer", "minimum": 0}}),
        "completion": _object({"shell": _TEXT, "script": _TEXT}),
    }


def _object(properties: dict[str, JSON]) -> JSON:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _reference(message: Descriptor) -> JSON:
    return {"$ref": f"#/$defs/{message.name}"}


def _define(message: Descriptor, defs: dict[str, JSON]) -> None:
    if message.name in defs:
        return
    defs[message.name] = _object({field.name: _field(field) for field in message.fields})
    for field in message.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            _define(field.message_type, defs)


def _field(field: FieldDescriptor) -> JSON:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field(field.message_type.fields_by_name["value"])}
    if field.is_repeated:
        return {"type": "array", "items": _single(field)}
    if field.has_presence:
        return {"anyOf": [_single(field), {"type": "null"}]}
    return _single(field)


def _single(field: FieldDescriptor) -> JSON:
    if field.message_type is not None:
        return _reference(field.message_type)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return {"type": "string", "examples": [v.name.removeprefix(prefix).lower() for v in field.enum_type.values]}
    if field.cpp_type in _INTEGERS:
        return {"type": "integer", "minimum": 0}
    if field.cpp_type in _SIGNED:
        return {"type": "integer"}
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return {"type": "boolean"}
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return dict(_TEXT)
    return {"type": ["number", "null"]}
