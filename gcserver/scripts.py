"""The commands `gcserver`, `gcctl` and `gcrun` as the installation's scripts call them.

What may live here: starting a command, and what is said where the extra `server` is missing: `pip install gradcomm`
brings the scripts too, with the client alone. What may not: what commands do; nothing is imported here that comes with
the extra.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

_FAILED: Final = 1
_OURS: Final = ("gcserver", "gcclient", "gcproto")


def gcserver() -> int:
    return run("gcserver", "gcserver.cli")


def gcctl() -> int:
    return run("gcctl", "gcserver.admin.gcctl")


def gcrun() -> int:
    return run("gcrun", "gcserver.gcrun")


def run(command: str, module: str) -> int:
    """``main`` of a module; the exit status."""
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if not (said := missing(error)):
            raise
        print(f"{command}: {said}", file=sys.stderr)
        return _FAILED
    return int(main())


def missing(error: ModuleNotFoundError) -> str:
    """What to do where a package of somebody else's is not there; "" where it is one of ours, which is a defect."""
    package = (error.name or "").partition(".")[0]
    if package in _OURS:
        return ""
    return (
        f"{package} is missing: this environment ({sys.prefix}) has gradcomm's client alone; pip install "
        "'gradcomm[server]', or run the command of the environment that the daemon is installed in"
    )
