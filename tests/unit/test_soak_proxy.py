"""The relay that flips bytes: what passes through it, what it changes, and that it says so."""

from __future__ import annotations

import random
import socket

import pytest

from benchmarks.lab import netns, ports
from tests.soak.proxy import Damage, Proxy, Route, read_route


def test_a_route_is_read_and_written_alike() -> None:
    assert read_route("127.0.0.1:8470=10.77.0.2:7470") == Route(("127.0.0.1", 8470), ("10.77.0.2", 7470))
    assert str(read_route("a:1=b:2")) == "a:1=b:2"
    for bad in ("a:1", "a:1=b", "a:1=b:x", "a:1=b:2=c:3", ":1=b:2"):
        with pytest.raises(ValueError, match="expected HOST:PORT=HOST:PORT"):
            read_route(bad)


def test_damage_is_one_bit_of_one_byte_each() -> None:
    damage, chance = Damage(), random.Random(1)
    assert damage.apply(b"whole") == (b"whole", None)
    for _ in range(200):
        damage.add(chance)
        piece = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 50)))
        changed, at = damage.apply(piece)
        assert at is not None and len(changed) == len(piece)
        different = [i for i, (a, b) in enumerate(zip(piece, changed, strict=True)) if a != b]
        assert different == [at] and (piece[at] ^ changed[at]).bit_count() == 1
    assert damage.apply(b"whole") == (b"whole", None)
    damage.add(chance)
    assert damage.apply(b"") == (b"", None)  # it waits for bytes
    assert damage.apply(b"x")[1] == 0


def exchange(data: bytes, through: int, server: socket.socket) -> tuple[bytes, bytes]:
    """(what arrives, what comes back) of ``data`` sent through the relay to a server that answers with the same."""
    with socket.create_connection(("127.0.0.1", through), timeout=20) as client:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(20)
            client.sendall(data)
            arrived = b""
            while len(arrived) < len(data):
                arrived += peer.recv(1 << 16)
            peer.sendall(data)
            back = b""
            while len(back) < len(data):
                back += client.recv(1 << 16)
    return arrived, back


def test_bytes_pass_both_ways_until_some_are_flipped_forwards() -> None:
    port = ports.free_ports(1)
    host = netns.Loopback(1).hosts[0]
    data = random.Random(2).randbytes(50_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        with Proxy(host, [Route(("127.0.0.1", port), server.getsockname()[:2])]) as proxy:
            assert exchange(data, port, server) == (data, data)
            assert proxy.flipped == 0
            proxy.flip(1, 0.0, 5)
            arrived, back = data, data
            while arrived == data:  # until the relay has read what it was told
                arrived, back = exchange(data, port, server)
            assert back == data
            assert sum((a ^ b).bit_count() for a, b in zip(data, arrived, strict=True)) == 1
    assert proxy.flipped == 1


def test_a_closed_end_closes_the_other() -> None:
    port = ports.free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        there = Route(("127.0.0.1", port), server.getsockname()[:2])
        with Proxy(netns.Loopback(1).hosts[0], [there]), socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(20)
            peer, _ = server.accept()
            peer.close()
            try:
                assert client.recv(10) == b""
            except ConnectionResetError:
                pass
        refused = Route(("127.0.0.1", port), ("127.0.0.1", ports.free_ports(1)))
        with Proxy(netns.Loopback(1).hosts[0], [refused]), socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(20)
            try:
                assert client.recv(10) == b""
            except ConnectionResetError:
                pass
