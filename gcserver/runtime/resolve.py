"""From a codec's spec to what the core needs to know of it.

What may live here: this one translation. What may not: codecs (`gcserver.codecs`), plans (`gcserver.core`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from gcserver.core.events import CodecChoice
from gcserver.core.plan import CASTS

if TYPE_CHECKING:
    from gcserver.codecs import Codec

#: ids of the codecs that send every element: none and the casts
DENSE = CASTS | {0}


@lru_cache(maxsize=512)
def resolve(spec: str) -> CodecChoice:
    """The choice a spec names. Raises CodecError (a ValueError) that says what would be accepted."""
    # Imported late: numba comes with it, and a supervisor starts without.
    from gcserver.codecs import CodecError, parse

    try:
        codec = parse(spec)
        if codec.rounds not in (1, 2):
            raise CodecError("codec", "one whose step takes one or two exchanges", f"{codec.name} with {codec.rounds}")
        return _choice(codec)
    except CodecError:
        raise
    except Exception as error:
        # A third party's code: whatever it raises must not stop a daemon that is asked for a plan.
        what = f"{spec!r}: {type(error).__name__}: {error}"
        raise CodecError("codec", "one whose code does not fail", what) from error


def _choice(codec: Codec) -> CodecChoice:
    return CodecChoice(
        codec.spec,
        codec.id,
        codec.level,
        # Of two elements: half an element of state would be none.
        codec.state_floats(2) > 0,
        codec.units == "sum",
        codec.shared_seed,
        codec.finalise == "vote",
        codec.rounds,
        whole=codec.layout == "matrix",
        owner_feedback=codec.rounds == 1 and codec.at_owner().state_floats(2) > 0,
        drains=codec.id in DENSE,
        levels=codec.levels,
        own=codec.own_level,
        exact=codec.exact,
        tunable=codec.tunable and codec.rounds == 1,
    )
