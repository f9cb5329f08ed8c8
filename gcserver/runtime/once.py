"""Lines for a log that are said once, however often there is cause.

What may live here: that. What may not: where they are said.
"""

from __future__ import annotations

from typing import Final

#: So many different lines at most: what peers and workers send may be in them, and a stranger must not fill the log.
MAX_SAID: Final = 256


class Once:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> bool:
        """Whether ``text`` is still to be said; from now on it is not."""
        if len(self._said) >= MAX_SAID or text in self._said:
            return False
        self._said.add(text)
        return True
