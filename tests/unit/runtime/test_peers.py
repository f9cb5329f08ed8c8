"""Addresses that somebody says a peer has: tried before they are believed.

What may live here: tests of `gcserver/runtime/peers.py`. What may not: frames' meaning (`core/test_peers.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.core.events import PeerAdded
from gcserver.runtime.peers import Peers


def told() -> tuple[Peers, list[Any], list[str], list[str]]:
    """Peers of node a, what its machine was told, warnings, and addresses that were connected to."""
    fed: list[Any] = []
    warned: list[str] = []
    opened: list[str] = []
    supervisor = SimpleNamespace(
        node="a", config=SimpleNamespace(node=SimpleNamespace(lanes=2)), feed=fed.append, warn_once=warned.append,
        lanes=SimpleNamespace(tell=lambda message: None),
    )  # fmt: skip
    peers = Peers.__new__(Peers)
    peers._s, peers.addresses = supervisor, {}  # type: ignore[assignment]
    peers.transport = SimpleNamespace(open=lambda node, address: opened.append(address))  # type: ignore[assignment]
    return peers, fed, warned, opened


def test_a_peer_is_reached_at_its_control_port() -> None:
    peers, fed, warned, opened = told()
    peers.know("b", "tcp://10.0.0.2:7470")
    assert opened == ["tcp://10.0.0.2:7472"] and not warned
    assert [type(e) for e in fed] == [PeerAdded]


@pytest.mark.parametrize("address", ["ipc:///run/x:1", "inproc://x:1", "tcp://b", "tcp://b:99999", "", "b:7470\n"])
def test_nothing_else_than_tcp_is_connected_to(address: str) -> None:
    peers, fed, warned, opened = told()
    peers.know("b", address)
    assert not opened and not fed and not peers.addresses
    assert "tcp://host:port" in warned[0]
