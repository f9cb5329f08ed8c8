"""How people write durations, on both sides: `GC_JOB_DEADLINE=1800s` means the same to a daemon and to its workers.

What may live here: turning a duration's text into seconds. What may not: other values (`gcserver/values.py`), which
settings there are, I/O.
"""

from __future__ import annotations

import math
import re
from typing import Final

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|d)?")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

DURATION_FORM: Final = 'a duration such as 30, "500ms", "30s", "5m" or "1h"'


def read_duration(raw: object) -> float:
    """Seconds. Takes a number or text; raises :class:`ValueError` that says what would be accepted."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"expected {DURATION_FORM}")
    if isinstance(raw, int | float):
        if not math.isfinite(raw) or raw < 0:
            raise ValueError(f"expected {DURATION_FORM}")
        return float(raw)
    found = _DURATION.fullmatch(raw.strip())
    if found is None or not math.isfinite(seconds := float(found[1]) * _SECONDS[found[2]]):
        raise ValueError(f"expected {DURATION_FORM}")
    return seconds
