"""How people write the speed of a link, on both sides: `gcctl advise 100mbit`, `gcclient.advise(bandwidths=["1gbit"])`.

What may live here: rates between text and bytes a second. What may not: other values, measuring links, I/O.
"""

from __future__ import annotations

import math
import re
from typing import Final

_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)(?:/s)?")
_BITS: Final = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

RATE_FORM: Final = "a rate such as 100mbit or 2.5gbit"


def read_rate(text: str) -> float:
    """``100mbit`` as bytes a second, above 0. Raises ValueError that says what would be accepted."""
    found = _RATE.fullmatch(text.strip().lower())
    if found is not None and found[2] in _BITS:
        bits = float(found[1]) * _BITS[found[2]]
        if math.isfinite(bits) and bits > 0:
            return bits / 8
    raise ValueError(f"expected {RATE_FORM}, got {text!r}")


def say_rate(bandwidth: float) -> str:
    """Bytes a second as links are named: bits, decimal."""
    bits = bandwidth * 8
    unit, name = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s")
    return f"{bits / unit:.3g} {name}"
