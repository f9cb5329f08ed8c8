"""What `gcctl` does without asking a daemon: `context list`, `show` and `use`, and `completion`.

What may live here: these commands and what they print. What may not: the file of contexts (`contexts.py`), the command
line (`gcctl_parser.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gcserver.admin import contexts, jsonform, tables
from gcserver.admin.contexts import NONE, Context, ContextError, Contexts
from gcserver.admin.gcctl_settings import DEFAULT_ADDRESS, chosen
from gcserver.values import human_duration


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """What one of the commands prints. Raises :class:`~gcserver.admin.contexts.ContextError`."""
    known = contexts.load(environ)
    if options.command == "context list":
        return _list(known, chosen(known, options, environ)[0], options.json)
    if options.command == "context show":
        context = known.get(options.name) if options.name else chosen(known, options, environ)[0]
        if context is None:
            text = (
                "no context is in use; name one (`gcctl context list`), or make one current (`gcctl context use NAME`)"
            )
            raise ContextError(f"{known.path}: {text}")
        return jsonform.text(_plain(context), indent=2) if options.json else _facts(context)
    contexts.use(known, options.name)
    name = "" if options.name == NONE else options.name
    if options.json:
        return jsonform.text({"file": str(known.path), "current": name}, indent=2)
    return f"{tables.clean(str(known.path))}: the current context is {name or NONE}"


def _list(known: Contexts, in_use: Context | None, as_json: bool) -> str:
    if as_json:
        used = in_use.name if in_use else ""
        found = [_plain(context) for context in known.known.values()]
        return jsonform.text({"file": str(known.path), "current": known.current, "in_use": used, "contexts": found}, 2)
    if not known.known:
        return f"no contexts: {tables.clean(str(known.path))} has none"
    rows = [
        ("*" if context is in_use else "", context.name, context.address or DEFAULT_ADDRESS,
         "yes" if context.tls_key else "no", context.job)
        for context in known.known.values()
    ]  # fmt: skip
    return tables.table(("IN USE", "NAME", "ADDRESS", "TLS", "JOB"), rows)


def _plain(context: Context) -> dict[str, Any]:
    plain = asdict(context)
    plain["timeout_seconds"] = plain.pop("timeout")
    return plain


def _facts(context: Context) -> str:
    said = asdict(context)
    said["timeout"] = "" if context.timeout is None else human_duration(context.timeout)
    return tables.facts(list(said.items()))


def completion(shell: str, as_json: bool) -> str:
    """The script that makes a shell complete what is typed after `gcctl`."""
    import argcomplete

    script: str = argcomplete.shellcode(["gcctl"], shell=shell)
    return jsonform.text({"shell": shell, "script": script}, indent=2) if as_json else script.rstrip("\n")
