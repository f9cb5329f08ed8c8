"""The first start of a daemon on a machine, when nobody has compiled its kernels yet.

What may live here: having that done beside a lane, and saying so. What may not: kernels, and which there are
(`gcserver.codecs.warmup`, `gcserver.planner.warmup`).
"""

from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
from typing import Final

from gcserver.codecs import warmup
from gcserver.parent import ends_with_parent

COMMAND: Final = (sys.executable, "-m", "gcserver.cli", "warmup")
log = logging.getLogger("gcserver")


def compile_what_is_missing() -> None:
    """Before a lane loads kernels; nothing where the cache has them. Never raises for what the child does: what is not
    in the cache afterwards is compiled by the lane itself."""
    if warmup.is_warm():
        return
    log.info("compiling %d kernels, and those of plans: once per version, a minute or two", len(warmup.kernels()))
    # In a process of its own: the compiler takes most of a gigabyte, which a lane would keep for its life.
    done = subprocess.run(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
        preexec_fn=functools.partial(ends_with_parent, signal.SIGKILL),
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        log.warning("compiling kernels beside the lane ended with %d, so the lane does it: %s", done.returncode, last)
