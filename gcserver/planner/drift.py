"""How far a job has moved away from what was known of it.

What may live here: one number between two profiles. What may not: what follows from it (planning anew is decided
elsewhere).
"""

from __future__ import annotations

from math import inf

from gcserver.planner.profile import Profile


def drift(old: Profile, new: Profile) -> float:
    """The larger of the relative changes of a step's computation and of the link between two profiles; 0: none.

    The change from a to b is max(a, b) / min(a, b) - 1, the same in both directions. The link's is that of the time in
    which it moves one partition, so that a latency that does not matter does not count; a guess (``samples`` 0) is no
    measurement, so nothing has changed where the newer one is a guess, and everything where only the older one was.
    Infinite, too, between profiles of different tensors or numbers of nodes.
    """
    if old.nodes != new.nodes or _shapes(old) != _shapes(new):
        return inf
    return max(_change(old.compute, new.compute), link_drift(old, new))


def link_drift(old: Profile, new: Profile) -> float:
    """The link's part of `drift`."""
    if not new.link.samples:
        return 0.0
    return _change(_transfer(old), _transfer(new)) if old.link.samples else inf


def _shapes(profile: Profile) -> set[tuple[str, tuple[int, ...]]]:
    return {(t.name, t.shape) for t in profile.tensors}


def _transfer(profile: Profile) -> float:
    """Seconds a partition takes on the link."""
    nbytes = min(profile.partition_bytes, 4 * profile.elements)
    return profile.link.latency + (nbytes / profile.link.bandwidth if profile.link.bandwidth > 0 else inf)


def _change(a: float, b: float) -> float:
    if a == b:
        return 0.0
    low, high = sorted((a, b))
    return high / low - 1 if low > 0 else inf
