"""What UCX is told, without UCX.

What may live here: tests of `gcserver/runtime/ucxdefaults.py`. What may not: what UCX makes of it
(`tests/system/test_ucx_endings.py`).
"""

from __future__ import annotations

import pytest

from gcserver.runtime import ucxdefaults

TCP = {"UCX_TCP_PUT_ENABLE": "n", "UCX_TCP_CONN_NB": "y"}


@pytest.mark.parametrize("tls", [None, "all", "tcp", "tcp,sm,self"])
def test_where_tcp_may_be_used_it_is_told_about_tcp(tls: str | None) -> None:
    said = {} if tls is None else {"UCX_TLS": tls}
    environ = dict(said)
    ucxdefaults.tell(environ)
    assert environ == {**said, "UCX_DEBUG_SIGNO": "0", **TCP}


def test_where_there_is_no_tcp_nothing_is_said_of_it() -> None:
    environ = {"UCX_TLS": "rc,sm,self"}
    ucxdefaults.tell(environ)
    assert environ == {"UCX_TLS": "rc,sm,self", "UCX_DEBUG_SIGNO": "0"}


def test_what_somebody_has_said_stays() -> None:
    said = {"UCX_DEBUG_SIGNO": "1", "UCX_TCP_PUT_ENABLE": "y", "UCX_TCP_CONN_NB": "n"}
    environ = dict(said)
    ucxdefaults.tell(environ)
    assert environ == said
