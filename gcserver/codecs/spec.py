"""Spec strings: their grammar, their decorators, and what a refusal says.

What may live here: taking a text such as ``topk(ratio=0.01)+ef(decay=0.9)`` apart and checking its values
against the declared parameters. Which codecs exist is `registry`'s; printing is the codec's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gcserver.codecs.base import CodecError, Param

#: decorator -> (parameters, what the codec's constructor calls them)
DECORATORS: dict[str, tuple[tuple[Param, ...], dict[str, str]]] = {
    "ef": (
        (Param("decay", 1.0, 0.0, 1.0, "share of the old residual that is kept; 0 turns it off"),),
        {"decay": "decay"},
    ),
    "momentum": (
        (
            Param("m", 0.9, 0.0, 0.9999, "momentum u = m*u + gradient, accumulated until sent; 0 turns it off"),
            Param("nesterov", 0.0, 0.0, 1.0, "1 for Nesterov's", integer=True),
        ),
        {"m": "momentum", "nesterov": "nesterov"},
    ),
}

_TERM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\(([^()]*)\))?\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Term:
    """One ``name(key=value, ...)`` of a spec, its values still text."""

    name: str
    given: dict[str, str]
    text: str


def split(spec: str) -> list[Term]:
    """The codec's term and its decorators'; CodecError if the text has another shape."""
    # A plus within parentheses belongs to a number (1e+06).
    return [_term(spec, text) for text in re.split(r"\+(?![^()]*\))", spec)]


def _term(spec: str, text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise CodecError("spec", "name, or name(key=value,...), then optionally +ef(...), +momentum(...)", repr(spec))
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, sep, value = (part.strip() for part in item.partition("="))
        if not sep or key in given:
            raise CodecError("spec", "each parameter once, as key=value", repr(item))
        given[key] = value
    return Term(match[1], given, text.strip())


def read(owner: str, params: tuple[Param, ...], given: dict[str, str]) -> dict[str, float | str]:
    """The values of all parameters, given or default; CodecError names what would be accepted."""
    known = {p.name: p for p in params}
    for key in given:
        if key not in known:
            raise CodecError(f"parameter of {owner}", f"one of {', '.join(known) or 'none'}", repr(key))
    values: dict[str, float | str] = {}
    for p in params:
        if p.name in given:
            values[p.name] = p.read(owner, given[p.name])
        elif p.default is None:
            raise CodecError(f"{owner}.{p.name}", p.allowed, "nothing", f"write {owner}({p.name}=...)")
        else:
            values[p.name] = p.default
    return values


def decorate(owner: str, takers: dict[str, list[str]], terms: list[Term]) -> dict[str, float | str]:
    """The constructor's keywords for the decorators of the codec ``owner``.

    takers: decorator -> names of the codecs it applies to. CodecError for one that is unknown, repeated or
    not for this codec, saying which would be accepted.
    """
    values: dict[str, float | str] = {}
    mine = [d for d, codecs in takers.items() if owner in codecs]
    seen: set[str] = set()
    for term in terms:
        if term.name not in mine or term.name in seen:
            accepted = " and ".join(f"at most one {d}({_keys(d)})" for d in mine) or "none"
            hint = f"{term.name} applies to {', '.join(takers[term.name])}" if term.name in takers else ""
            raise CodecError(f"decorator of {owner}", accepted, repr(term.text), "" if term.name in mine else hint)
        seen.add(term.name)
        params, names = DECORATORS[term.name]
        values |= {names[k]: v for k, v in read(term.name, params, term.given).items()}
    return values


def _keys(decorator: str) -> str:
    return ",".join(f"{p.name}=..." for p in DECORATORS[decorator][0])
