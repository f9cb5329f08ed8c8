"""What the measured step of the plan in force says of machine and link, for the prices of all other plans.

What may live here: how far a step is beyond its prediction, and the profile that knows it. What may not: which plan is
better (`auto.py`), measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import Profile, ProfileError

if TYPE_CHECKING:
    from gcserver.planner.auto import Wish


@dataclass(frozen=True, slots=True)
class Beyond:
    """Seconds of a step beyond its prediction, those of CPU time of lanes and network, and the bytes that the mean node
    sends; all 0 where nothing can be told."""

    unexplained: float = 0.0
    cpu: float = 0.0
    sent: float = 0.0


class Terms(msgspec.Struct, frozen=True):
    """What was learned of a profile in pricing a plan: as in `Profile`, and the link's bandwidth."""

    forward: float
    bandwidth: float
    interference: float


def terms(profile: Profile) -> Terms:
    """Those of a profile that is `informed`."""
    return Terms(profile.forward, profile.link.bandwidth, profile.interference)


def under(profile: Profile, known: Terms | None) -> Profile:
    """The profile with what was learned of it; as it is where a proposal of an older daemon does not say."""
    if known is None:
        return profile
    link = msgspec.structs.replace(profile.link, bandwidth=known.bandwidth)
    return msgspec.structs.replace(profile, forward=known.forward, interference=known.interference, link=link)


def interference(found: Beyond) -> float:
    """Seconds by which a step grows for each second of CPU time outside the workers, in [0, 1].

    What a step takes beyond its prediction (without interference) is laid at the door of what lanes and network compute
    meanwhile: workers that share their cores with them wait. More than all of that cannot be. 0 under rules whose
    codecs have no cost here (an operator's, the model's own): of their steps nothing can be told.
    """
    return min(max(found.unexplained / found.cpu, 0.0), 1.0) if found.cpu > 0 else 0.0


def slowness(profile: Profile, found: Beyond) -> float:
    """Seconds of a step that not even an interference of 1 explains: machine and link together are slower than when the
    profile was measured. At most as much as computing takes. 0 where the link is a guess, which may be what is off."""
    return min(max(found.unexplained - found.cpu, 0.0), profile.compute) if profile.link.samples else 0.0


def informed(profile: Profile, wish: Wish) -> Profile:
    """The profile with the interference and the slowness that the step of the wish's rules gives away; as it is where
    no step is known.

    What is slower is computing, under every plan, or the exchange, the more so the more is sent; one step does not tell
    which. So each bears its share of it, by the seconds that computing and the link take: the long steps of a dense
    exchange say little of those of a plan that sends a tenth.
    """
    if wish.step <= 0:
        return profile
    link = profile.link
    found = beyond(Live(profile, portions(profile, wish.buckets, wish.groups)), wish.rules, wish.step)
    learned, slower = interference(found), slowness(profile, found)
    if slower:
        times = 1.0 + slower / (profile.compute + found.sent / link.bandwidth)
        link = msgspec.structs.replace(link, bandwidth=link.bandwidth / times)
        slower = profile.compute * (times - 1.0)
    return msgspec.structs.replace(profile, interference=learned, forward=profile.forward + slower, link=link)


def beyond(live: Live, rules: Sequence[PlannedRule], measured: float) -> Beyond:
    """What a step that took ``measured`` seconds under ``rules`` has beyond its prediction."""
    try:
        options = applied(live, rules)
    except ProfileError:
        return Beyond()
    return Beyond(measured - live.seconds(options), live.cpu(options), sent(live, options))


def sent(live: Live, options: Sequence[BlockOption]) -> float:
    """Bytes that the mean node sends in a step."""
    return sum(live.sent(b, option) for b, option in enumerate(options))
