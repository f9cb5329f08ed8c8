"""Command lines whose errors are one line, as scripts and docs/commands.md expect; argparse puts the usage before them.

What may live here: that. What may not: what any command takes, imports that cost time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final, NoReturn

#: the exit status of a wrong command line
USAGE: Final = 2


class Parser(argparse.ArgumentParser):
    """Ends with `USAGE` and one line on stderr that names whose help to look at."""

    def error(self, message: str) -> NoReturn:
        self.complain(f"{' '.join(message.split())}; see `{self.prog} --help`")
        sys.exit(USAGE)

    def complain(self, line: str) -> None:
        """Print it, after the program's name."""
        if sys.stderr is not None:  # print would take stdout for it
            print(f"{self.prog.split()[0]}: {line}", file=sys.stderr, flush=True)
