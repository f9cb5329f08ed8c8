"""Which numbers lives of processes can have.

What may live here: that question. What may not: what a new life means for a link (`link.py`), how one is numbered
(`gcserver.runtime.statefiles`).

Lives are numbered by the time, and only a higher number counts as a later one. Whoever was believed a number far ahead
could have no successor: everything that its next life says would be taken for an echo.
"""

from __future__ import annotations

#: 64 bits of a frame's header
LAST_LIFE = (1 << 64) - 1


def doubt(name: str, incarnation: int, latest: int) -> str:
    """Why ``incarnation`` is not believed to be a life of ``name``, if ``latest`` is the highest there can be by now;
    empty if it is."""
    if incarnation <= latest:
        return ""
    return (
        f"{name} says that this is its life {incarnation}, and none can be above {latest} by now (they are the time in "
        f"ns): set the clocks of both nodes; if {name}'s was ahead, stop its daemon and remove *.incarnation in its "
        "node.state"
    )
