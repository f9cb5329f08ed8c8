"""Looks at the keys of a daemon: whether they can be used, who else could use them, whether nodes fit together.

What may live here: questions about files of keys, answered as in `checks.py`. What may not: reading them (`keys.py`).
"""

from __future__ import annotations

from pathlib import Path

from gcserver import keys
from gcserver.checks import Check
from gcserver.config import Config
from gcserver.keys import KeyFileError

_NAME = "keys"
_MAKE = "make keys with `gcserver keygen`, and put all nodes' .pub files into security.peers"


def keys_of(config: Config) -> list[Check]:
    """Whether the daemon has keys that work and that are its own alone."""
    security = config.security
    if security.key is None or security.peers is None:
        if config.node.listen.loopback:
            return [Check(_NAME, "ok", "no keys: for daemons on this machine only")]
        text = (
            f"no keys, and {config.node.listen.endpoint} can be reached by others: whoever does can take part in jobs"
        )
        return [Check(_NAME, "warn", text, _MAKE)]
    try:
        pair, admitted = keys.read_pair(security.key), keys.read_admitted(security.peers)
    except KeyFileError as error:
        return [Check(_NAME, "fail", str(error), _MAKE)]
    found = [_own(config, pair, admitted), *_exposed(security.key), *_writable(security.peers)]
    for peer in config.others:
        if peer.name not in admitted:
            text = f"{peer.name} of cluster.peers is not in {security.peers}: it is neither let in nor connected to"
            found.append(Check(_NAME, "warn", text, f"add the .pub file of {peer.name}"))
    return found


def _own(config: Config, pair: keys.KeyPair, admitted: keys.Admitted) -> Check:
    name, listed = config.node.name, config.security.peers
    if pair.name != name:
        text = f"{config.security.key} is of node {pair.name!r}, this is {name!r}: others would refuse it"
        return Check(_NAME, "fail", text, "correct node.name or security.key")
    if name not in admitted:
        text = f"{name} is not in {listed} itself; where other nodes use the same list, they refuse this one"
        return Check(_NAME, "warn", text, f"add: {keys.line(name, pair.public)}")
    if admitted[name] != pair.public:
        text = f"{listed} has another key for {name} than {config.security.key}: nodes with this list refuse this one"
        return Check(_NAME, "fail", text, f"replace that line by: {keys.line(name, pair.public)}")
    return Check(_NAME, "ok", f"{name} has one, {len(admitted)} nodes are admitted")


def _exposed(secret: Path) -> list[Check]:
    why = keys.exposed(secret)
    return [Check(_NAME, "fail", why, f"chown to the daemon's user and chmod 600 {secret}")] if why else []


def _writable(listed: Path) -> list[Check]:
    found = listed.stat()
    if not found.st_mode & 0o002:
        return []
    text = f"{listed} can be written by everybody: anybody could admit anybody"
    return [Check(_NAME, "fail", text, f"chmod 644 {listed}")]
