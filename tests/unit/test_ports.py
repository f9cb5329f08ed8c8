"""Which ports are free."""

from __future__ import annotations

import socket

import pytest

from benchmarks.lab.ports import free_ports
from gcserver import ports

HOSTS = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_row_is_free_where_none_of_it_is_taken(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        port = free_ports(3) + 2
        taken.bind((host, port))
        taken.listen()
        assert not ports.free(host, port, 1)
        assert not ports.free(host, port - 2, 3)
    assert ports.free(host, port, 1)


def test_what_is_no_address_of_this_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        ports.free("192.0.2.1", 20_000, 1)
