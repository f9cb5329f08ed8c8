"""Spec strings on the client's side: the same grammar as the daemon's, for the codecs that exist here.

What may live here: taking a text such as ``topk(ratio=0.01)+ef(decay=0.9)`` apart. The daemon has the last word on
specs; here a mistake only has to be clear.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from gcclient.gpu_codecs.base import CLASSES, GpuCodec, GpuCodecError

_TERM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\(([^()]*)\))?\s*", re.ASCII)


def names() -> list[str]:
    """The codecs that have a GPU twin, in the order of their ids."""
    return sorted(CLASSES, key=lambda name: CLASSES[name].id)


@lru_cache(maxsize=512)
def make(spec: str) -> GpuCodec:
    """The GPU codec a spec names; GpuCodecError saying what would be accepted."""
    # A plus within parentheses belongs to a number (1e+06).
    terms = [_term(spec, text) for text in re.split(r"\+(?![^()]*\))", spec)]
    name, given = terms[0]
    cls = CLASSES.get(name)
    if cls is None:
        raise GpuCodecError(f"codec: expected one of {', '.join(names())} (others run in the daemon), got {name!r}")
    values = {key: _value(cls, key, text) for key, text in given.items()}
    for param in cls.params:
        if param.name not in values and param.default is None:
            raise GpuCodecError(f"{name}: write {name}({param.name}=...)")
        values.setdefault(param.name, param.default)
    decay: float | None = None
    momentum, nesterov = 0.0, False
    for decorator, options in terms[1:]:
        numbers = {key: _number(f"{decorator}.{key}", text) for key, text in options.items()}
        if decorator == "ef" and cls.keeps_residual and numbers.keys() <= {"decay"}:
            decay = numbers.get("decay", 1.0)
        elif decorator == "momentum" and cls.takes_momentum and numbers.keys() <= {"m", "nesterov"}:
            momentum, nesterov = numbers.get("m", 0.9), bool(numbers.get("nesterov", 0.0))
        else:
            raise GpuCodecError(f"decorator of {name}: {decorator}({', '.join(options)}) does not apply")
    return cls(spec, values, decay, momentum, nesterov)


def _term(spec: str, text: str) -> tuple[str, dict[str, str]]:
    match = _TERM.fullmatch(text)
    if match is None:
        raise GpuCodecError(f"spec: expected name(key=value,...) and then +ef(...) or +momentum(...), got {spec!r}")
    given = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, sep, value = (part.strip() for part in item.partition("="))
        if not sep or key in given:
            raise GpuCodecError(f"spec: expected each parameter once, as key=value, got {item!r}")
        given[key] = value
    return match[1], given


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise GpuCodecError(f"{what}: expected a number, got {text!r}") from None


def _value(cls: type[GpuCodec], key: str, text: str) -> Any:
    known = {param.name: param for param in cls.params}
    if key not in known:
        raise GpuCodecError(f"parameter of {cls.name}: expected one of {', '.join(known) or 'none'}, got {key!r}")
    param = known[key]
    if param.words:
        if text not in param.words:
            raise GpuCodecError(f"{cls.name}.{key}: expected one of {', '.join(param.words)}, got {text!r}")
        return text
    value = _number(f"{cls.name}.{key}", text)
    if not param.low <= value <= param.high:
        raise GpuCodecError(f"{cls.name}.{key}: expected a number in [{param.low}, {param.high}], got {text}")
    return value
