"""Imported once, by the process that the others of a run are forked from: all targets, and kernels that are compiled.

What may live here: what every process of a run would otherwise do for itself, some seconds each. What may not: anything
that starts a thread, reads the environment or belongs to one target.
"""

from __future__ import annotations

from gcserver.codecs.warmup import warmup
from tests.fuzz import targets as targets

warmup()
