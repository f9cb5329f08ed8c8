"""Accordion (Agarwal et al. 2021): little compression of a layer while its gradients change fast, much otherwise.

What may live here: its decision. What may not: L-GreCo; the combination is `LevelTable.with_default` with what this
decides, and a wider range (L-GreCo, section 5.3).

Every few epochs the norm of each layer's accumulated, reduced gradient is compared with the one that many epochs ago.
A regime is critical if it changed by half or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gcserver.planner.errors import TableError

ETA = 0.5


def critical(before: float | None, now: float, eta: float = ETA) -> bool:
    """Whether a layer is in a critical regime: |before - now| / before >= eta.

    before: None at the first decision, which is critical, as is everything that has no ratio: a norm of zero before
    (both the authors' rules), or one that is not finite.
    """
    if before is None or before <= 0.0 or not math.isfinite(before) or not math.isfinite(now):
        return True
    return abs(before - now) / before >= eta


def accordion(
    before: Sequence[float] | None,
    now: Sequence[float],
    *,
    low: int,
    high: int,
    eta: float = ETA,
    rate_decayed: bool = False,
) -> tuple[int, ...]:
    """A level for each layer: ``high``, the precise one, in critical regimes, ``low`` otherwise.

    before, now: L2 norms of the layers' accumulated reduced gradients, one decision ago (None: this is the first) and
    now. rate_decayed: the learning rate was lowered since, which is critical for all layers. Raises TableError.
    """
    if low > high:
        raise TableError("low", f"a level that is not above {high}", low)
    if not eta > 0.0:
        raise TableError("eta", "a positive share", eta)
    if before is not None and len(before) != len(now):
        raise TableError("before", f"norms of the same {len(now)} layers", len(before))
    earlier = [None] * len(now) if before is None else list(before)
    return tuple(high if rate_decayed or critical(b, n, eta) else low for b, n in zip(earlier, now, strict=True))
