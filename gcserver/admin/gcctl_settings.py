"""Which daemon `gcctl` asks, and how: what options, variables and contexts come to.

What may live here: which of them wins, and of what is used where it came from. What may not: reading the file of
contexts (`contexts.py`), making connections (`gcctl_tls.py`, `gcctl_calls.py`).

An option wins over a context that `--context` names, that over a variable, and that over the current context: whoever
writes `--context lab` means that daemon, whatever a variable in the shell says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gcserver.admin import contexts
from gcserver.admin.access import Paths
from gcserver.admin.contexts import NONE, Context, ContextError, Contexts
from gcserver.admin.exits import CtlError, Exit

DEFAULT_ADDRESS: Final = "127.0.0.1:7460"
ADDRESS_VARIABLE: Final = "GC_NODE_ADMIN"
#: names the context, as `--context` does, but without its precedence
CONTEXT_VARIABLE: Final = "GCCTL_CONTEXT"
#: how long a daemon may take, seconds; and where a job has to make steps, is planned for or traced
USUAL_TIMEOUT: Final = 10.0
LONG_TIMEOUT: Final = 60.0
#: option, variable, key of a context, what for
TLS: Final = (
    ("--tls-ca", "GC_TLS_CA", "tls_ca", "certificate of the CA that made the daemon's (ca.pem of `gcserver pki`)"),
    ("--tls-cert", "GC_TLS_CERT", "tls_cert", "your certificate"),
    ("--tls-key", "GC_TLS_KEY", "tls_key", "its private key"),
)


class SettingError(CtlError):
    """An option or a variable is wrong. ``str()`` says which and what to give."""

    status = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Value:
    """A setting, and who said it: an option, a variable, or a key of a context."""

    text: str
    source: str
    of_context: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """``tls``: what was given of the three files, by option; checked by `gcctl_tls.files`. ``timeout``: seconds, None
    where nobody said. ``job``: "" where nobody did."""

    address: str
    tls: Mapping[str, Value]
    timeout: float | None
    job: str


def settle(options: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Raises :class:`SettingError` and :class:`~gcserver.admin.contexts.ContextError`."""
    wanted = getattr(options, "context", None) or environ.get(CONTEXT_VARIABLE)
    # Without any the file is not looked at, whatever may be wrong with it.
    known = Contexts(contexts.place(environ)) if wanted == NONE else contexts.load(environ)
    context, named = chosen(known, options, environ)

    def look(option: str, variable: str, key: str) -> Value | None:
        given = getattr(options, option[2:].replace("-", "_"), None)
        of_context = getattr(context, key) if context is not None else ""
        found = [
            Value(given, option) if given else None,
            Value(environ[variable], variable) if environ.get(variable) else None,
            Value(of_context, f"{known.path}: contexts.{context.name}.{key}", True) if context and of_context else None,
        ]
        if named:
            found[1:] = reversed(found[1:])
        return next((value for value in found if value is not None), None)

    address = look("--address", ADDRESS_VARIABLE, "address")
    try:
        where = contexts.read_address(address.text) if address else DEFAULT_ADDRESS
    except ValueError as error:
        assert address is not None
        raise SettingError(f"{address.source}: {error}; got {address.text!r}") from None
    tls = {option: value for option, variable, key, _ in TLS if (value := look(option, variable, key))}
    timeout = getattr(options, "timeout", None) or (context.timeout if context else None)
    job = getattr(options, "job", "") or (context.job if context else "")
    return Settings(where, tls, timeout, job)


def chosen(known: Contexts, options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Context | None, bool]:
    """The context to use, if any, and whether `--context` named it. Raises ContextError."""
    given = getattr(options, "context", None)
    name = given or environ.get(CONTEXT_VARIABLE) or known.current
    if not name or name == NONE:
        return None, bool(given)
    try:
        return known.get(name), bool(given)
    except ContextError as error:
        if given or name == known.current:
            raise
        raise ContextError(f"{CONTEXT_VARIABLE}: {error}") from None


def tls_paths(tls: Mapping[str, Value]) -> Paths:
    """Where all three files are, without looking. Raises :class:`SettingError` for a home that is nobody's."""
    found = []
    for option, *_ in TLS:
        value = tls[option]
        try:
            found.append(Path(value.text).expanduser())
        except RuntimeError:
            text = f"{value.source}: {value.text} names no user of this machine; give the file's path"
            raise SettingError(text) from None
    return Paths(*found)
