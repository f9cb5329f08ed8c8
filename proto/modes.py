"""Who makes a job's plans, and what those may lose: the words for it.

What may live here: these words, which workers, configuration, gRPC and `gcctl` share. What may not: what they lead to
(`gcserver.planner`).
"""

from __future__ import annotations

from typing import Final

STATIC: Final = "static"
AUTO: Final = "auto"
BALANCED: Final = "balanced"
FAST: Final = "fast"
#: operators; the planner with all of its parts; the planner with one of them
MODES: Final = (STATIC, AUTO, "espresso", "mergecomp", "lgreco")
QUALITIES: Final = ("safe", BALANCED, FAST)


def unknown(mode: str, quality: str) -> str:
    """Why these are no words for it, and which are; empty if they are. Empty words stand for a default."""
    for name, word, known in (("plan", mode, MODES), ("quality", quality, QUALITIES)):
        if word and word not in known:
            return f"{name}={word!r}: expected one of {', '.join(known)}"
    return ""
