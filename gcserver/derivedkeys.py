"""Keys of nodes derived from one secret: whoever has it knows every node's keys, without a word between them.

What may live here: the derivation, the two files that a daemon takes such keys from, the secret in the environment.
What may not: what keys and files of keys are (`keys.py`), who asks for them (`private.py`,
`deploy/slurm/job_daemon.py`).

A node's secret key is HMAC-SHA256 (RFC 2104) of what the keys are for and the node's name, under the secret: 32 bytes,
as Curve25519 takes them, which clears and sets the bits that it wants to by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from gcserver import keys
from gcserver.keys import KeyPair

#: The variable with the secret of a job's private daemons.
VARIABLE: Final = "GC_JOB_SECRET"
#: What the keys of private daemons are for.
PRIVATE: Final = "gradcomm private daemon key"
MIN_SECRET_BYTES: Final = 32


class SecretError(ValueError):
    """A secret that no keys are derived from; the message says what is expected, never what the secret is."""


def pair(secret: bytes, purpose: str, node: str) -> KeyPair:
    """The keys of ``node`` for a ``purpose``, which keeps keys from one secret apart. Raises SecretError."""
    from zmq import curve_public  # only who needs keys loads it
    from zmq.utils import z85

    if len(secret) < MIN_SECRET_BYTES:
        raise SecretError(f"the secret has {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}")
    private: bytes = z85.encode(hmac.digest(secret, f"{purpose}\0{node}".encode(), hashlib.sha256))
    return KeyPair(node, curve_public(private), private)


def write(folder: Path, secret: bytes, purpose: str, node: str, nodes: Iterable[str]) -> tuple[Path, Path]:
    """The file of ``node``'s key and the list of it and ``nodes``, in ``folder``: what security.key and security.peers
    are to name. Raises SecretError, OSError."""
    pairs = {name: pair(secret, purpose, name) for name in {*nodes, node}}
    private, _ = keys.write(pairs[node], folder)
    listed = folder / "peers"
    write_list(listed, {name: pairs[name].public for name in sorted(pairs)})
    return private, listed


def write_list(listed: Path, admitted: Mapping[str, bytes]) -> None:
    """The list of admitted nodes, in one step: a daemon that is killed meanwhile finds the old one or the new one."""
    new = listed.with_name(f"{listed.name}.new")
    new.write_text("".join(keys.line(name, key) + "\n" for name, key in admitted.items()))
    os.replace(new, listed)


def of_environment(environ: Mapping[str, str]) -> bytes | None:
    """The job's secret; None where there is none. Raises SecretError."""
    secret = os.fsencode(environ.get(VARIABLE, ""))
    if secret and len(secret) < MIN_SECRET_BYTES:
        raise SecretError(
            f"{VARIABLE} has {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}, drawn at random for this job: "
            "`openssl rand -hex 32`"
        )
    return secret or None


def take(environ: MutableMapping[str, str]) -> bytes:
    """The job's secret, whatever it is worth, out of what this process hands on; empty where there is none."""
    return os.fsencode(environ.pop(VARIABLE, ""))
