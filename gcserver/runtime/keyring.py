"""The keys of a daemon while it runs: its own, those it admits, and that the list of those changes.

What may live here: reading them again, telling the sockets and the control machine. What may not: files of keys
(`gcserver/keys.py`), who is let in (`guard.py`), keys that workers name (`registrations.py`), what a job does without a
node (`gcserver.core`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from gcserver import derivedkeys, keys
from gcserver.config import SecurityConfig
from gcserver.core.control_events import PeerExpelled
from gcserver.keys import KeyFileError, KeyPair
from gcserver.values import read_name

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

log = logging.getLogger("gcserver")


class Keyring:
    """``pair`` is this node's. ``secret``: of the job of a private daemon, whose keys come from it; else None. Raises
    KeyFileError where the files cannot be used."""

    def __init__(self, supervisor: Supervisor, pair: KeyPair, watch: keys.Watch, secret: bytes | None = None) -> None:
        self._s, self.pair, self._watch, self._secret = supervisor, pair, watch, secret

    @property
    def derived(self) -> bool:
        """Whether nodes are admitted that have the keys that the job's secret gives them."""
        return self._secret is not None

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

    def introduce(self, published: tuple[tuple[str, str], ...]) -> None:
        """Admit those of these nodes, (name, key), that have the key which the job's secret gives them."""
        if self._secret is None:
            return
        new = {}
        for name, key in published:
            if name not in self.admitted and key:
                with contextlib.suppress(ValueError):  # no name of a node
                    new[read_name(name)] = key.encode()
        found = {name: key for name, key in new.items() if _derived(self._secret, name).public == key}
        if not found:
            return
        try:
            derivedkeys.write_list(self._watch.path, {**self.admitted, **found})
        except OSError as error:
            log.error("%s cannot be written: %s", self._watch.path, error)
            return
        self.reload()

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


def unwelcome(ring: Keyring | None, published: tuple[tuple[str, str], ...]) -> str:
    """As :func:`why_not`, after those were admitted whom the job's secret admits."""
    if ring is not None:
        ring.introduce(published)
    return why_not(ring, published)


def why_not(ring: Keyring | None, published: tuple[tuple[str, str], ...]) -> str:
    """Why nodes that say they have these keys, (name, key), cannot be talked to; "" when they can."""
    for name, key in published:
        if bool(key) is not (ring is not None):
            return f"{name} runs {'with' if key else 'without'} keys, and this node {'without' if key else 'with'}"
        if ring is None:
            continue
        known = ring.admitted.get(name)
        if ring.derived and known != key.encode():
            return f"{name} has another key than this job's secret gives it ({derivedkeys.VARIABLE})"
        if known is None:
            return f"{name} is not in this node's security.peers"
        if key.encode() != known:
            return f"{name} has another key than this node's security.peers says"
    return ""


def _derived(secret: bytes, node: str) -> KeyPair:
    return derivedkeys.pair(secret, derivedkeys.PRIVATE, node)


def open_keyring(supervisor: Supervisor, node: str, security: SecurityConfig, secret: bytes = b"") -> Keyring | None:
    """The keys of ``node``; None where none are configured. Raises KeyFileError.

    ``secret``: what stands in the environment. It counts where this node's own key was derived from it: the list of
    another daemon is its operator's.
    """
    if security.key is None or security.peers is None:
        return None
    pair = keys.read_pair(security.key)
    if pair.name != node:
        raise KeyFileError(
            f"{security.key} is the key of node {pair.name!r}, this is {node!r}: others would refuse it; correct "
            "node.name or security.key"
        )
    own = len(secret) >= derivedkeys.MIN_SECRET_BYTES and _derived(secret, node) == pair
    return Keyring(supervisor, pair, keys.Watch(security.peers), secret if own else None)
