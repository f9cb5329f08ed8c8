"""The keys of a daemon while it runs: its own, those it admits, and that the list of those changes.

What may live here: reading them again, telling the sockets and the control machine. What may not: files of keys
(`gcserver/keys.py`), who is let in (`guard.py`), keys that workers name (`registrations.py`), what a job does without a
node (`gcserver.core`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gcserver import keys
from gcserver.config import SecurityConfig
from gcserver.core.control_events import PeerExpelled
from gcserver.keys import KeyFileError, KeyPair

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

log = logging.getLogger("gcserver")


class Keyring:
    """``pair`` is this node's. Raises KeyFileError where the files cannot be used."""

    def __init__(self, supervisor: Supervisor, pair: KeyPair, watch: keys.Watch) -> None:
        self._s, self.pair, self._watch = supervisor, pair, watch

    @property
    def admitted(self) -> dict[str, bytes]:
        """Public keys by node."""
        return self._watch.admitted

    def tick(self) -> None:
        """Read the list again if it changed, have all sockets follow it, and jobs lose whom it does not have."""
        self._read()
        # Not only of what changed: a job may have been taken up again, or formed just before.
        jobs = self._s.machine.jobs.values()
        members = {m.node for job in jobs if job.ended is None for m in job.record.members}
        for name in sorted(members - self.admitted.keys() - {self._s.node}):
            self._s.feed(PeerExpelled(name))

    def reload(self) -> None:
        """As :meth:`tick`, and take the list as it is now: who asks for that has finished writing it."""
        self._read(asked=True)
        self.tick()

    def _read(self, asked: bool = False) -> None:
        before = self.admitted
        try:
            if not self._watch.changed(asked):
                return
        except KeyFileError as error:
            log.error("%s; the nodes admitted so far stay admitted", error)
            self._s.count("key_lists_unusable")
            return
        now = self.admitted
        for what, names in (
            ("admitted", now.keys() - before.keys()),
            ("no longer admitted", before.keys() - now.keys()),
            ("admitted with another key", {n for n in now.keys() & before.keys() if now[n] != before[n]}),
        ):
            if names:
                log.info("security.peers changed: %s: %s", what, ", ".join(sorted(names)))
        self._s.peers.transport.admit(now)
        self._s.lanes.admit(now)


def why_not(ring: Keyring | None, published: tuple[tuple[str, str], ...]) -> str:
    """Why nodes that say they have these keys, (name, key), cannot be talked to; "" when they can."""
    for name, key in published:
        if bool(key) is not (ring is not None):
            return f"{name} runs {'with' if key else 'without'} keys, and this node {'without' if key else 'with'}"
        if ring is None:
            continue
        known = ring.admitted.get(name)
        if known is None:
            return f"{name} is not in this node's security.peers"
        if key.encode() != known:
            return f"{name} has another key than this node's security.peers says"
    return ""


def open_keyring(supervisor: Supervisor, node: str, security: SecurityConfig) -> Keyring | None:
    """The keys of ``node``; None where none are configured. Raises KeyFileError."""
    if security.key is None or security.peers is None:
        return None
    pair = keys.read_pair(security.key)
    if pair.name != node:
        raise KeyFileError(
            f"{security.key} is the key of node {pair.name!r}, this is {node!r}: others would refuse it; correct "
            "node.name or security.key"
        )
    return Keyring(supervisor, pair, keys.Watch(security.peers))
