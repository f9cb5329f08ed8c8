"""Ports that tests choose side by side."""

from __future__ import annotations

import multiprocessing
import socket

import pytest

from benchmarks.lab import ports


def test_ports_are_successive_and_free() -> None:
    first = ports.free_ports(3)
    for port in range(first, first + 3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_nobody_is_given_what_another_chose_and_has_not_bound() -> None:
    ours = {ports.free_ports(7) for _ in range(20)}
    assert len(ours) == 20, "not twice while there are others"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = set(pool.map(ports.free_ports, [7] * 20, chunksize=1))
    of = {(port - ports.FIRST) // ports.BLOCK for port in ours}
    assert len(of) == 1
    assert of.isdisjoint((port - ports.FIRST) // ports.BLOCK for port in theirs)


def test_what_is_bound_is_left_out_and_comes_again_when_it_is_not() -> None:
    block = ports.Block()
    try:
        with socket.create_server(("127.0.0.1", block.first + 1)):
            assert block.take(2) == block.first + 2
            with pytest.raises(ports.PortsError, match=rf"no {ports.BLOCK} successive free ports from {block.first} "):
                block.take(ports.BLOCK)
        with pytest.raises(ports.PortsError):
            block.take(ports.BLOCK + 1)  # would reach into another's
        while (found := block.take(2)) != block.first:
            assert found > block.first
    finally:
        block.close()


def test_a_block_is_one_processs_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ports.Block()
    monkeypatch.setattr(ports, "FIRST", block.first)
    monkeypatch.setattr(ports, "END", block.first + ports.BLOCK)
    with pytest.raises(ports.PortsError, match="other processes'"):
        ports.Block()
    block.close()
    again = ports.Block()
    assert again.first == block.first
    again.close()
