"""What the measured step of the plan in force says of machine and link, for the prices of all other plans.

What may live here: how far a step is beyond its prediction, and the profile that knows it. What may not: which plan is
better (`auto.py`), measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from gcserver.planner.auto_rules import PlannedRule, applied
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.live_layout import portions
from gcserver.planner.profile import Profile, ProfileError

if TYPE_CHECKING:
    from gcserver.planner.auto import Wish

#: of the interval in which the ``busy`` of a step is sought
_HALVINGS: Final = 10


@dataclass(frozen=True, slots=True)
class Beyond:
    """Seconds of a step beyond its prediction, those of CPU time of lanes and network, and the bytes that the mean node
    sends; all 0 where nothing can be told."""

    unexplained: float = 0.0
    cpu: float = 0.0
    sent: float = 0.0


class Terms(msgspec.Struct, frozen=True):
    """What was learned of a profile in pricing a plan: as in `Profile`, and the link's bandwidth. ``busy``: 0 in those
    of an older daemon, which left it as it was measured."""

    forward: float
    bandwidth: float
    interference: float
    busy: float = 0.0


def terms(profile: Profile) -> Terms:
    """Those of a profile that is `informed`."""
    return Terms(profile.forward, profile.link.bandwidth, profile.interference, profile.busy)


def under(profile: Profile, known: Terms | None) -> Profile:
    """The profile with what was learned of it; as it is where a proposal of an older daemon does not say."""
    if known is None:
        return profile
    link = msgspec.structs.replace(profile.link, bandwidth=known.bandwidth)
    return msgspec.structs.replace(
        profile, forward=known.forward, interference=known.interference, link=link, busy=known.busy or profile.busy
    )


def interference(found: Beyond) -> float:
    """Seconds by which a step grows for each second of CPU time outside the workers, in [0, 1].

    What a step takes beyond its prediction (without interference) is laid at the door of what lanes and network compute
    meanwhile: workers that share their cores with them wait. More than all of that cannot be. 0 under rules whose
    codecs have no cost here (an operator's, the model's own): of their steps nothing can be told.
    """
    return min(max(found.unexplained / found.cpu, 0.0), 1.0) if found.cpu > 0 else 0.0


def waiting(busy: float) -> float:
    """The interference that goes with kernels that take ``busy`` times as long as alone, in [0, 1).

    For that share of its time such a kernel waits for a core that others have. While it has the core itself, they wait
    for it as often.
    """
    return 1.0 - 1.0 / busy


def shared(live: Live, options: Sequence[BlockOption], seconds: float) -> Profile:
    """The profile of ``live`` with so much of ``busy``, and the interference that goes with it, that a step under
    ``options`` takes ``seconds``: no less than with neither, no more than with all.

    The profile's ``busy`` is that of all kernels. Those that a step ends with run while the workers wait, with more of
    a core than those that run beside computing. Were all stretched alike, and computing not at all, moving everything
    as it is would look the better the busier the cores are, as it computes nothing that is stretched.
    """

    def at(busy: float) -> Profile:
        return msgspec.structs.replace(live.profile, busy=busy, interference=waiting(busy))

    def enough(busy: float) -> bool:
        return Live(at(busy), live.brought).seconds(options) >= seconds

    least, most = 1.0, live.profile.busy
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return at(most)


def slowness(profile: Profile, found: Beyond) -> float:
    """Seconds of a step that not even an interference of 1 explains: machine and link together are slower than when the
    profile was measured. At most as much as computing takes. 0 where the link is a guess, which may be what is off."""
    return min(max(found.unexplained - found.cpu, 0.0), profile.compute) if profile.link.samples else 0.0


def informed(profile: Profile, wish: Wish) -> Profile:
    """The profile with the interference and the slowness that the step of the wish's rules gives away; as it is where
    no step is known.

    No less interference than goes with how much longer kernels take (`waiting`): if a step does not give away as much,
    its end was stretched less than kernels are on the whole (`shared`).

    What is slower is computing, under every plan, or the exchange, the more so the more is sent; one step does not tell
    which. So each bears its share of it, by the seconds that computing and the link take: the long steps of a dense
    exchange say little of those of a plan that sends a tenth.
    """
    if wish.step <= 0:
        return profile
    live, link = Live(profile, portions(profile, wish.buckets, wish.groups)), profile.link
    found = beyond(live, wish.rules, wish.step)
    learned, slower = interference(found), slowness(profile, found)
    if found.cpu > 0 and learned < waiting(profile.busy):
        predicted = wish.step - found.unexplained
        profile = shared(live, applied(live, wish.rules), predicted + learned * found.cpu)
        learned = profile.interference
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
