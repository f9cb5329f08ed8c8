"""What the measured step of the plan in force says of machine and link, for the prices of all other plans.

What may live here: how far a step is beyond its prediction, and the profile that knows it. What may not: which plan is
better (`auto.py`), measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from gcserver.planner import live_kernels
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
    """Seconds of a step beyond its prediction, those of CPU time of lanes and network, the bytes that the mean node
    sends, and what its blocks use; all 0 and empty where nothing can be told."""

    unexplained: float = 0.0
    cpu: float = 0.0
    sent: float = 0.0
    options: tuple[BlockOption, ...] = ()


class Terms(msgspec.Struct, frozen=True):
    """What was learned of a profile in pricing a plan: as in `Profile`, and the link's bandwidth. ``busy``: 0 where a
    daemon before this field says them; the profile's is meant."""

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


def least_interference(busy: float) -> float:
    """The interference that is taken to go with kernels that take ``busy`` times as long as alone, in [0, 0.5].

    Of that time such a kernel waits for a share of 1 - 1/busy for a core that others have, and for 1/busy it has one
    itself. The workers are taken to wait for that core as often as it does for theirs, but no longer than it has one.
    """
    return min(busy - 1.0, 1.0) / busy


def busy_that_fits(live: Live, options: Sequence[BlockOption], seconds: float) -> float:
    """How much longer kernels take than alone, from 1 to the profile's ``busy``, for a step under ``options`` to take
    ``seconds`` with the interference that goes with it; ``live``: without any.

    The profile's ``busy`` is that of all kernels. Those that a step waits for are taken to be its last, which run while
    the workers wait, too, with more of a core than those that run beside computing.
    """
    measured = live.table([options])
    alone = Live(msgspec.structs.replace(live.profile, busy=1.0), live.brought).table([options])
    first = np.zeros(len(options), np.int64)

    def enough(busy: float) -> bool:
        table = alone + (measured - alone) * (busy - 1.0) / (live.profile.busy - 1.0)
        cpu = float(table[:, 0, live_kernels.CPU].sum())
        return live.run(table, first)[0] + least_interference(busy) * cpu >= seconds

    least, most = 1.0, live.profile.busy
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def slowness(profile: Profile, found: Beyond) -> float:
    """Seconds of a step that not even an interference of 1 explains: machine and link together are slower than when the
    profile was measured. At most as much as computing takes. 0 where the link is a guess, which may be what is off."""
    return min(max(found.unexplained - found.cpu, 0.0), profile.compute) if profile.link.samples else 0.0


def informed(profile: Profile, wish: Wish) -> Profile:
    """The profile with the interference, ``busy`` and slowness that the step of the wish's rules gives away; as it is
    where no step is known.

    No less interference than goes with how much longer kernels take: where a step leaves no room for that, it is
    kernels that take less long (`busy_that_fits`), or else moving everything as it is, where a step waits for few
    kernels, would look the better the busier the cores are. Where it took less than predicted, the link may be what was
    faster: then the prediction is what has to fit.

    What is slower is computing, under every plan, or the exchange, the more so the more is sent; one step does not tell
    which. So each bears its share of it, by the seconds that computing and the link take: the long steps of a dense
    exchange say little of those of a plan that sends a tenth.
    """
    if wish.step <= 0:
        return profile
    profile = msgspec.structs.replace(profile, interference=0.0)
    live, link, busy = Live(profile, portions(profile, wish.buckets, wish.groups)), profile.link, profile.busy
    found = beyond(live, wish.rules, wish.step)
    learned, slower = interference(found), slowness(profile, found)
    if found.cpu > 0 and learned < least_interference(busy):
        busy = busy_that_fits(live, found.options, wish.step - min(found.unexplained, 0.0))
        learned = least_interference(busy)
    if slower:
        times = 1.0 + slower / (profile.compute + found.sent / link.bandwidth)
        link = msgspec.structs.replace(link, bandwidth=link.bandwidth / times)
        slower = profile.compute * (times - 1.0)
    return msgspec.structs.replace(
        profile, busy=busy, interference=learned, forward=profile.forward + slower, link=link
    )


def beyond(live: Live, rules: Sequence[PlannedRule], measured: float) -> Beyond:
    """What a step that took ``measured`` seconds under ``rules`` has beyond its prediction."""
    try:
        options = applied(live, rules)
    except ProfileError:
        return Beyond()
    return Beyond(measured - live.seconds(options), live.cpu(options), sent(live, options), tuple(options))


def sent(live: Live, options: Sequence[BlockOption]) -> float:
    """Bytes that the mean node sends in a step."""
    return sum(live.sent(b, option) for b, option in enumerate(options))
