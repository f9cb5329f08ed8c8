"""What UCX is told, without UCX.

What may live here: tests of `gcserver/runtime/ucxenviron.py`, and what `gcserver/checks_ucx.py` says of it. What may
not: anything that needs libucp (`tests/system/test_ucx.py`, `tests/system/test_ucx_endings.py`).
"""

from __future__ import annotations

import pytest

from gcserver import checks_ucx, config
from gcserver.runtime import ucxenviron
from gcserver.runtime.ucxenviron import UcpRefused
from gcserver.runtime.ucxtransport import UcxTransport


@pytest.mark.parametrize("tls", ["sm", "sm,self", "posix, cma", "self"])
def test_shared_memory_alone_is_refused(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    with pytest.raises(UcpRefused, match=f"UCX_TLS={tls} names shared memory only, .*UCX_TLS=tcp.*zmq"):
        UcxTransport("tcp://127.0.0.1:1")
    (found,) = checks_ucx.library(config.load(flags={"node.transport": "ucx"}))
    assert found.fatal and "shared memory only" in found.text and "UCX_TLS=tcp" in found.fix


@pytest.mark.parametrize("tls", [None, "all", "tcp", "tcp,sm,self", "^ib", "", "rc,sm"])
def test_whatever_has_a_network_is_left_to_ucx(tls: str | None) -> None:
    ucxenviron.refuse_shared_memory({} if tls is None else {"UCX_TLS": tls})


def test_loopback_confines_ucx_unless_somebody_says_otherwise() -> None:
    assert ucxenviron.devices(True, {}) == "lo"
    assert ucxenviron.devices(False, {}) == ""
    assert ucxenviron.devices(True, {"UCX_NET_DEVICES": "mlx5_0:1"}) == ""
