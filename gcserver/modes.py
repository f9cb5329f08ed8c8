"""The words for who makes a job's plans and what those may lose, as the daemon and its commands know them.

What may live here: the names of `gcproto.modes`. What may not: words of the daemon's own, which workers would not know.
"""

from __future__ import annotations

from gcproto.modes import AUTO, BALANCED, MODES, QUALITIES, STATIC

__all__ = ["AUTO", "BALANCED", "MODES", "QUALITIES", "STATIC"]
