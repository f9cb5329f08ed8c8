"""Whether systemd-logind would remove a running daemon's memory when its user logs out.

What may live here: that question. What may not: what to do under systemd in general (`docs/deploy/systemd.md`).

With ``RemoveIPC=yes`` logind removes everything that a user owns in /dev/shm when that user's last session ends, also
what services of that user hold. It spares system users and whoever lingers.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Final

from gcserver.checks import Check

#: The first uid of a person (``SYS_UID_MAX`` of login.defs and one more, as systemd is built everywhere).
FIRST_PERSON: Final = 1000
#: where POSIX shared memory lies, which is what logind looks through
SHARED: Final = Path("/dev/shm")
LINGERING: Final = Path("/var/lib/systemd/linger")
_QUESTION: Final = (
    "--system", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
    "RemoveIPC",
)  # fmt: skip


def kept_at_logout(state: Path, uid: int, timeout: float, lingering: Path = LINGERING) -> Check | None:
    """Whether what ``uid`` keeps in ``state`` outlives that user's sessions; None where logind has no say in it.
    logind gets ``timeout`` seconds to answer."""
    if uid < FIRST_PERSON or not state.is_relative_to(SHARED) or not _removes(timeout):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        return None  # nobody who can log in
    if (lingering / user).exists():
        return Check("logout", "ok", f"{state} outlives the sessions of {user}, who lingers")
    text = f"systemd-logind removes {state} when the last session of {user} ends (RemoveIPC=yes), with the jobs in it"
    fix = f"`loginctl enable-linger {user}`, or RemoveIPC=no in /etc/systemd/logind.conf, or run it as a system user"
    return Check("logout", "warn", text, fix)


def _removes(timeout: float) -> bool:
    """What logind itself says, whatever files it was configured by; False where there is none."""
    if (busctl := shutil.which("busctl")) is None:
        return False
    try:
        said = subprocess.run([busctl, *_QUESTION], capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0 and said.stdout.split() == ["b", "true"]
