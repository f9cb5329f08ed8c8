"""The base of frozen data: headers, events and effects.

What may live here: the base class and the function that copies with changes. What may not: any record.

A record is what a frozen dataclass is, made in C: a lane makes some thirty for every block, and a frozen dataclass
sets each field by a call of its own. Subclass as ``class Name(Record, frozen=True, gc=False)``: what refers only to
immutable values can be in no cycle, so the garbage collector need not look at it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

__all__ = ["Record", "replace"]


class Record(msgspec.Struct, frozen=True, gc=False):
    """Immutable, compared by value."""
