"""Profiles in files, so that the next run of a job starts from what this one measured.

What may live here: names of files, reading and writing them. What may not: what is in a profile
(`gcserver.planner.profile`), when it is written (`profiler.py`).

Nothing here ends a job or a daemon: what goes wrong with a file is a warning, and the job is measured anew.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gcproto import wire
from gcproto.manifest import Section
from gcserver.core.events import Member
from gcserver.planner.profile import CODEC_COSTS, Profile, ProfileError, dump, load

#: Only so many of the newest files are kept.
MAX_FILES: Final = 256
MAX_BYTES: Final = 64 << 20
#: A file that was begun so many seconds before the newest profile was written is nobody's any more.
LEFT_AFTER: Final = 3600.0
#: What ends the name of a profile, of whichever job; the same folder holds what codecs cost, and maybe files of others.
_OURS: Final = re.compile(r"-[0-9a-f]{16}\.json$")


def file_name(job: str, domain: str, sections: tuple[Section, ...], members: tuple[Member, ...], node: str) -> str:
    """The file of a domain's profile: the same when a job of that label has the same tensors on the same nodes.

    ``node`` is the one that measured; several may share the directory.
    """
    tensors = tuple((t.name, t.shape, t.dtype) for s in sections for t in s.tensors)
    where = tuple((m.name, m.ranks) for m in members)
    digest = wire.digest(msgspec.msgpack.encode((job, domain, tensors, where, node)))
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', job).lstrip('.')[:64] or 'job'}-{digest:016x}.json"


class ProfileStore:
    """The files of one directory. ``warn`` takes a line for the log; both may be used in any thread."""

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn

    def load(self, name: str) -> Profile | None:
        """None where there is no such file, or none that can be used, which is said."""
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            with path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ProfileError(f"{path}: a profile has at most {MAX_BYTES} bytes")
            return load(text, str(path))
        except FileNotFoundError:
            return None
        except (OSError, ProfileError) as error:
            self._warn(f"a saved profile cannot be used, the job is measured anew: {error}")
            return None

    def save(self, name: str, profile: Profile) -> None:
        """Write it whole or not at all."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(dump(profile))
                os.replace(partial, self._folder / name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
            self._prune()
        except OSError as error:
            self._warn(f"profiles cannot be kept in {self._folder} (plan.profiles): {error.strerror or error}")

    def _prune(self) -> None:
        """Forget the oldest. Another daemon may do the same in the same directory."""
        assert self._folder is not None
        found = []
        for path in self._folder.glob("*.json"):
            if _OURS.search(path.name) and not path.name.startswith(CODEC_COSTS):
                with suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path))
        found.sort()
        old = [path for _, path in found[:-MAX_FILES]]
        # What nobody came to put in its place, since a daemon was ended while it wrote.
        newest = found[-1][0] if found else 0.0
        for path in self._folder.glob(".*.tmp"):
            with suppress(FileNotFoundError):
                if newest - path.stat().st_mtime > LEFT_AFTER:
                    old.append(path)
        for path in old:
            with suppress(OSError):  # another user's: whoever wrote it forgets it
                path.unlink(missing_ok=True)
