"""All targets by name.

What may live here: that list. A new one is made by its class, and belongs to the tests by being here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.fuzz.admin import Requests
from tests.fuzz.arenas import Arenas
from tests.fuzz.configs import Configs
from tests.fuzz.control import Control
from tests.fuzz.credentials import Credentials
from tests.fuzz.daemon import Daemon
from tests.fuzz.doorbells import Doorbells
from tests.fuzz.files import Files
from tests.fuzz.frames import Frames
from tests.fuzz.harness import Target
from tests.fuzz.payloads import Payloads
from tests.fuzz.plans import Plans
from tests.fuzz.registration import Registration
from tests.fuzz.scrapes import Scrapes

#: the target that is a running daemon, and how many inputs it gets where others get more
LIVE: Final = "daemon"
LIVE_INPUTS: Final = 400

_ALL: Final[tuple[Callable[[], Target], ...]] = (
    Frames, Control, Registration, Doorbells, Requests, Scrapes, Configs, Credentials, Plans, Payloads, Arenas, Files,
    Daemon,
)  # fmt: skip
TARGETS: Final[dict[str, Callable[[], Target]]] = {t.name: t for t in _ALL}  # type: ignore[attr-defined]
#: Inputs that meet two lanes or supervisors, made for them, cost some ten milliseconds; others one or less.
SLOW: Final = frozenset({"frames", "control", "registration", "doorbells", "arenas"})
MEDIUM: Final = frozenset({"admin", "files"})


def share(name: str) -> int:
    """How many inputs a target gets beside the others."""
    return 1 if name in SLOW else 2 if name in MEDIUM else 6
