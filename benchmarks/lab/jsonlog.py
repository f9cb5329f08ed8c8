"""What a process logs for another one: a JSON value a line, read while the file grows.

What may live here: reading such a file. What may not: what the lines mean.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class JsonLog:
    """The file at ``path``, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def news(self) -> list[Any]:
        """What has come since the last call. A line that is not finished waits for its end."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            return [json.loads(line) for line in whole.splitlines()]
        return []
