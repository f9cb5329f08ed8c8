"""How the C library copies megabytes: around the caches, if it is told to.

What may live here: what processes are started with for that, what the C library of this machine does unless it is told.
What may not: copies of our own kernels (`gcserver.codecs.stream`), malloc's settings (`gcserver.runtime.lanes`).

A gradient that goes into the arena, and an average that comes back, is in no cache when it is needed next. glibc copies
around the caches from a size on that it takes from the last level (three quarters of a thread's share, since 2.38 a
quarter of the whole), and below it overwrites lines that it has fetched for nothing. Virtual machines often show a
guest of few cores the host's whole cache: then no block is ever large enough.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: The variable in which glibc is told, when a process starts.
VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold"
#: Copies of so many bytes go around the caches: what a core of a machine that shows its own cache would have for it.
AROUND: Final = 1 << 20
SETTING: Final = f"{TUNABLE}={AROUND}"
_LISTED: Final = re.compile(rf"^{re.escape(TUNABLE)}: (0x[0-9a-f]+|[0-9]+)\b", re.MULTILINE)


def around_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process copies megabytes around the caches, beside those of ``environ``.

    Empty where that says something of it already, and on machines where nobody would read it.
    """
    given = environ.get(VARIABLE, "")
    if TUNABLE in given or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return {}
    return {VARIABLE: f"{given}:{SETTING}" if given else SETTING}


def threshold() -> int | None:
    """From how many bytes on copies of a process with this one's environment go around the caches; None where the C
    library does not say."""
    try:
        if (loader := _loader()) is None:
            return None
        listed = subprocess.run([loader, "--list-tunables"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # glibc before 2.33, or another C library
    found = _LISTED.search(listed.stdout)
    return int(found[1], 0) if found else None


def _loader() -> str | None:
    """The path of the dynamic loader that started this process."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith("ld-"):
            return f"/{path}"
    return None
