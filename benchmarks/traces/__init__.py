"""The traces of this folder (README.md says where they come from). What may live here: reading them, nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gcserver.planner.trace import Trace, parse_trace

FOLDER: Final = Path(__file__).parent
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def read(names: Iterable[str] = NAMES) -> list[Trace]:
    """Those traces, in that order. Raises OSError for a name that is not among ``NAMES``."""
    return [parse_trace((FOLDER / f"{name}.json").read_bytes(), f"{name}.json") for name in names]
