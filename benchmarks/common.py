"""What every measurement shares: the machine it ran on, sizes, taking turns, the JSON that is written.

What may live here: helpers without an opinion of what is measured. What may not: a benchmark.

The format is ``{"machine": {...}, "rows": [...]}``. A row is flat: ``system`` (gradcomm, gloo, ...), the parameters of
that run (``nodes``, ``bytes``, ``network``, ``codec``, ...), ``median_s``, ``runs`` (how many the median is of), and
whatever else was measured. Absolute times mean little on shared machines, so systems take turns within one run and are
compared by the ratio of their medians.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores this process may use, memory, system, versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("gradcomm", "torch", "numpy", "pyzmq")},
    }


def describe(machine: Mapping[str, Any]) -> str:
    """One line of it for a heading."""
    return "{date}, {cpu}, {cores} cores, {memory_gib} GiB, {system}, torch {torch}".format(**machine)


def read_size(text: str) -> int:
    """``"64MiB"``, ``"4KiB"``, ``"1000000"`` as bytes; ValueError saying what is accepted."""
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"size {text!r}: expected a number of bytes, or one with KiB, MiB, GiB, KB, MB or GB")
    return round(float(match[1]) * UNITS[match[2].upper()])


def show_size(nbytes: int) -> str:
    """In the largest binary unit that leaves a whole number: 4 KiB, 64 MiB, 1000 B."""
    for unit in ("GIB", "MIB", "KIB"):
        if nbytes >= UNITS[unit] and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]} {unit[0]}iB"
    return f"{nbytes} B"


def read_sizes(text: str) -> list[int]:
    """``"4KiB,1MiB"`` as listed; ``"4KiB..256MiB"`` as powers of four from the first, with the last."""
    if ".." not in text:
        return [read_size(part) for part in text.split(",")]
    low, high = (read_size(part) for part in text.split(".."))
    if not 0 < low <= high:
        raise ValueError(f"sizes {text!r}: expected FROM..TO with 0 < FROM <= TO")
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 4
    return [*sizes, high]


def median_row(system: str, times: Sequence[float], **more: Any) -> Row:
    """A row from the times of its runs, s; ``more`` are parameters and other measurements."""
    return {"system": system, **more, "median_s": statistics.median(times), "runs": len(times)}


def show_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: 812 us, 4.21 ms, 1.37 s."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule that a benchmark judges by. ``met`` None: what it needs was not measured, or it does not apply here."""

    rule: str
    met: bool | None
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {'not judged' if self.met is None else 'met' if self.met else 'MISSED'} ({self.detail})"


class Table:
    """Columns of text, printed row by row while the measurement runs: ``{heading: width}``."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.columns = dict(columns)

    def head(self) -> str:
        return self.line(*self.columns)

    def line(self, *cells: str) -> str:
        """One row; the first column is set to the left, numbers to the right."""
        widths = list(self.columns.values())
        first, rest = cells[0], cells[1:]
        return first.ljust(widths[0]) + "".join(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))


def write_json(path: str | Path | None, rows: Sequence[Row], **more: Any) -> None:
    """``{"machine": ..., "rows": ...}`` and ``more`` beside them; nothing if there is no path."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine(), **more, "rows": list(rows)}, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
