"""Writes docs/commands.md: every command and option of `gcserver` and `gcrun`, from their parsers.

What may live here: how a parser is shown as Markdown. What may not: what commands do (`gcserver/cli.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from gcserver import cli, gcrun
from gcserver.admin.gcctl_parser import commands_of
from gcserver.config_keys import KEYS
from tools import generated
from tools.generated import cell

PAGE = generated.ROOT / "docs" / "commands.md"
HEAD = """\
# gcserver and gcrun

Every command and option, as the programs themselves say with `--help`. This page is generated from their parsers:
change those, then `make commands`.

Exit status of `gcserver`: 0 done, 1 it could not be done, 2 the command line or the configuration is wrong, 130
interrupted. `gcrun` exits as its command did; 1 if the daemon cannot be started, 2 for a wrong command line or
configuration, 126 or 127 if the command cannot be run. Every error is one line on stderr;
[troubleshooting.md](troubleshooting.md) goes by their texts.

*Keys* below are those of the [configuration](configuration.md): each is a flag of that name (`--node.name a`) wherever
the table says so.
"""


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A row for each option and argument of one command, configuration keys as one row."""
    keys = {key.flag for key in KEYS}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or keys & set(action.option_strings):
            continue
        if action.nargs == argparse.REMAINDER:
            yield f"| `-- COMMAND [ARGUMENT ...]` | {cell(action.help or 'what to run')} |"
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
        yield f"| `{names}{value}` | {cell(action.help or '')} |"
    if any(keys & set(action.option_strings) for action in parser._actions):
        yield "| `--KEY VALUE` | every key of the [configuration](configuration.md) |"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = str(action.metavar or action.dest.upper())
    return f"{name} [{name} ...]" if action.nargs == "+" else name


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for top in (cli.parser(), gcrun.parser()):
        for name, parser in commands_of(top, top.prog):
            about = cell(parser.description or "")
            parts.append(f"## {name}\n\n{about[:1].upper()}{about[1:]}.\n")
            if rows := list(options(parser)):
                parts.append("| option | |\n|---|---|\n" + "\n".join(rows) + "\n")
            if parser.epilog:
                parts.append(f"{cell(parser.epilog)}\n")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    return generated.keep({PAGE: page()}, "commands", argv)


if __name__ == "__main__":
    sys.exit(main())
