"""Writes what docs/gcctl.md lists (commands, options, exit statuses) and docs/gcctl.schema.json, from gcctl's parser.

The lists go between the page's marks. The rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from gcserver.admin import jsonform
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_parser import commands_of, parser
from tools import generated
from tools.generated import cell

DOCS = generated.ROOT / "docs"
PAGE = DOCS / "gcctl.md"
SCHEMA = DOCS / "gcctl.schema.json"


def written(action: argparse.Action) -> str:
    """How an option or argument is written: ``--level {debug,info}``, ``[RULE ...]``."""
    value = str(action.metavar or action.dest.upper())
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return {"*": f"[{value} ...]", "?": f"[{value}]"}.get(str(action.nargs), value)
    name = action.option_strings[-1]
    return name if action.nargs == 0 else f"{name} {value}"


def rows(actions: list[argparse.Action]) -> str:
    lines = [f"| `{written(a)}` | {cell(a.help or '')} |" for a in actions]
    return "\n".join(["| option | |", "|---|---|", *lines])


def common(whole: argparse.ArgumentParser) -> list[argparse.Action]:
    """What every command takes."""
    every = [{a.dest for a in command._actions} for _, command in commands_of(whole)]
    return [a for a in whole._actions if all(a.dest in dests for dests in every)]


def commands(whole: argparse.ArgumentParser) -> Iterator[str]:
    """A section for each command: what it does, how it is written, and what only it takes."""
    shared = {a.dest for a in common(whole)}
    for name, command in commands_of(whole):
        own = [a for a in command._actions if a.dest not in shared]
        usage = " ".join(f"[{written(a)}]" if a.option_strings and not a.required else written(a) for a in own)
        about = cell(command.description or "")
        yield f"### gcctl {name}\n\n{about[:1].upper()}{about[1:]}.\n\n```\n{f'gcctl {name} {usage}'.strip()}\n```"
        if own:
            yield rows(own)


def lists() -> dict[str, str]:
    """By the name of their marks."""
    whole = parser()
    statuses = [f"| {status.value} | {cell(status.about)} |" for status in Exit]
    return {
        "common": rows(common(whole)),
        "commands": "\n\n".join(commands(whole)),
        "statuses": "\n".join(["| status | |", "|---|---|", *statuses]),
    }


def filled(page: str) -> str:
    """The page with current lists. Raises ValueError where a mark is missing."""
    return generated.filled(page, {name: f"\n{text}\n" for name, text in lists().items()}, "docs/gcctl.md")


def main(argv: list[str] | None = None) -> int:
    schema = json.dumps(jsonform.schema(), indent=2, ensure_ascii=False) + "\n"
    return generated.keep({PAGE: filled(PAGE.read_text()), SCHEMA: schema}, "gcctl", argv)


if __name__ == "__main__":
    sys.exit(main())
