"""Who makes a job's plans, and what those may lose: the words for it.

What may live here: these words, which configuration, gRPC and `gcctl` share. What may not: what they lead to
(`gcserver.planner`).
"""

from __future__ import annotations

from typing import Final

STATIC: Final = "static"
AUTO: Final = "auto"
#: operators; the planner with all of its parts; the planner with one of them
MODES: Final = (STATIC, AUTO, "espresso", "mergecomp", "lgreco")
QUALITIES: Final = ("safe", "balanced", "fast")
