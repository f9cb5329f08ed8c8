"""Pairs of CURVE keys that are the same in every run, so that tests made of them have the same names everywhere.

What may live here: making them. What may not: tests; keys that protect anything.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85

from gcserver.keys import KeyPair


def fixed_pair(name: str, which: str = "") -> KeyPair:
    """The pair of node ``name``; another one for each ``which``."""
    secret = z85.encode(hashlib.sha256(f"{name} {which}".encode()).digest())
    return KeyPair(name, zmq.curve_public(secret), secret)
