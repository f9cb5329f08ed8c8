"""Variables that switch something on or off, read alike by workers and by what starts daemons for them.

What may live here: that. What may not: keys of the daemon's configuration (`gcserver.config_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "": False,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def read_switch(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether ``variable`` is set to on. Raises ValueError for a word that says neither."""
    text = environ.get(variable, "")
    try:
        return _WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{variable}={text}: expected 1 (on) or 0 (off)") from None
