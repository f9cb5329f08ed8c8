"""Letting nodes that were lost come back: places between steps at which all ranks agree to wait for them.

What may live here: the admission points of a session, as its worker passes them. What may not: who is let in, which
daemons decide (`gcserver.core.admission`); how ranks find out alike that anybody waits (`calls.py`); what whoever comes
in is sent (`broadcasts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gcproto.epoch_messages import Admit

if TYPE_CHECKING:
    from gcclient.session import Session


class Admission:
    """``hear``: who is told that ranks came in, so that all count alike from then on what they count by themselves."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.hear: list[Callable[[], None]] = []
        self._passed = 0
        self._epoch = 0
        self._standing: Admit | None = None

    def begin(self) -> None:
        """The job is there. Whoever comes into one that runs has passed the points before it."""
        self._passed, self._epoch = self._session.membership.admissions, self._session.membership.epoch

    def again(self) -> None:
        """The daemon has restarted, and may not know where this rank stands. Called with its link's lock held."""
        if self._standing is not None:
            self._session.daemon.control.post(self._standing)

    def point(self) -> tuple[int, ...]:
        """Stand at the next point until whoever can be let in has been; returns who came. All ranks alike.

        Raises the job's failure, :class:`~gcclient.StepTimeout`.
        """
        session, members = self._session, self._session.membership
        number = self._passed = self._passed + 1
        session.announce(message := Admit(number), lambda: setattr(self, "_standing", message))
        who = ", ".join(members.nodes) if members.waiting and members.nodes else "nodes"
        session.wait_for(lambda: members.admissions >= number, f"{who} to be let in", "epoch", session.patience)
        self._standing = None
        for hear in self.hear:
            hear()
        before, self._epoch = self._epoch, members.epoch
        return members.came(before)
