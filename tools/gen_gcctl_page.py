"""Writes what docs/gcctl.md lists (commands, options, exit statuses) and docs/gcctl.schema.json, from gcctl's parser.

`python tools/gen_gcctl_page.py` writes them, the lists between the page's marks; with `--check` it writes nothing and
exits with 1 when they are not current. The rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gcserver.admin import jsonform
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_parser import commands_of, parser

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "gcctl.md"
SCHEMA = DOCS / "gcctl.schema.json"


def cell(text: str) -> str:
    """One cell of a table, of what argparse would print."""
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


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
    for name, text in lists().items():
        marks = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if len(marks.findall(page)) != 1:
            raise ValueError(f"docs/gcctl.md: expected one pair of marks named {name}")
        page = marks.sub(lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}", page)
    return page


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description="generate the lists of docs/gcctl.md and docs/gcctl.schema.json")
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 when not current")
    check = options.parse_args(argv).check
    schema = json.dumps(jsonform.schema(), indent=2, ensure_ascii=False) + "\n"
    status = 0
    for path, text in ((PAGE, filled(PAGE.read_text())), (SCHEMA, schema)):
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"docs/{path.name} is not current: run `make gcctl`", file=sys.stderr)
            status = 1
        else:
            path.write_text(text)
            print(f"wrote docs/{path.name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
