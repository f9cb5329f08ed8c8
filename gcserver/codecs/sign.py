"""signsgd, signum (Bernstein et al. 2018, 2019: majority vote) and efsignsgd (Karimireddy et al. 2019).

What may live here: these codecs. Layout and kernels are `signs`'. signsgd and signum send bare signs and
keep no residual: the owner adds up the signs of all members and sends the sign of the sum, so that
every element decodes to -1 or 1 and the optimizer's learning rate is the length of its step. One bit has no
room for "undecided": a zero, and so a tied vote, gets a sign by chance, from the seed, with equal odds. A
fixed sign would push everything undecided in one direction, half of all elements where two members vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from gcserver.codecs.base import U32, Encoded, Param, register
from gcserver.codecs.framed import Call
from gcserver.codecs.onebit import Means
from gcserver.codecs.signs import Signs, votes_encode


class Votes(Signs):
    """Bare signs, decided by majority; ``beta`` is the momentum's, 0 for none."""

    numbers = 0
    units = "mean"
    finalise = "vote"
    conserves = False
    beta = 0.0

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        share = call.scale * (1.0 - self.beta)
        return Encoded(*votes_encode(*call.arrays, call.m, share, self.beta, call.seed))


@register
class SignSGD(Votes):
    """1 bit an element plus 4 bytes a segment; a majority vote."""

    id, name = 33, "signsgd"


@register
class Signum(Votes):
    """signsgd of a momentum that each member keeps: m = beta*m + (1 - beta)*gradient.

    The state is m. At the owner beta is 0, which makes the method signsgd.
    """

    id, name = 34, "signum"
    params = (Param("beta", 0.9, 0.0, 0.9999, "share of the old momentum that is kept"),)

    def configure(self, beta: float = 0.9) -> None:
        self.beta = beta

    def values(self) -> Mapping[str, float | str]:
        return {"beta": self.beta}

    def state_floats(self, n: int, segments: int = 1) -> int:
        return n if self.beta else 0

    def at_owner(self) -> Self:
        return type(self)(beta=0.0)


@register
class EFSignSGD(Means):
    """1 bit an element plus 8 bytes a segment: sign times mean magnitude (algorithm 1, without its learning rate)."""

    id, name = 35, "efsignsgd"
    numbers = 1
