"""Whether a daemon that has ended is started again.

What may live here: that rule, for whoever keeps a daemon where no service manager does. What may not: starting and
ending it (`keeper.py`, `deploy/slurm/job_daemon.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Pause before the next life, seconds.
PAUSE: Final = 0.2
#: After so many lives in a row that were shorter than YOUNG seconds there is no other.
MOST: Final = 3
YOUNG: Final = 10.0


@dataclass(slots=True)
class Lives:
    """What is known of the lives of one daemon."""

    count: int = 0
    young: int = 0

    def another(self, status: int, seconds: float) -> bool:
        """Whether to start it again after a life of ``seconds`` that ended with ``status``, negative for a signal.

        Not one that ended by itself with 0; nor one that gave up at once in its first life, which has said why; nor
        one that keeps dying.
        """
        self.count += 1
        self.young = self.young + 1 if seconds < YOUNG else 0
        gave_up = status > 0 and self.count == self.young == 1
        return status != 0 and not gave_up and self.young < MOST
