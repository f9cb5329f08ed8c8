"""The system's libucp, for tests.

What may live here: whether there is one, and what UCX is told to use. What may not: transports, assertions.
"""

from __future__ import annotations

import pytest

from gcserver.runtime import ucp


def _there() -> bool:
    try:
        ucp.load()
    except ucp.UcpMissing:
        return False
    return True


needs_ucx = pytest.mark.skipif(not _there(), reason="needs libucp (Debian: libucx0)")


@pytest.fixture(params=["tcp", "tcp,sm,self"])
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use, in this process and those that it starts; shared memory beside a network it leaves out."""
    monkeypatch.setenv("UCX_TLS", request.param)
    chosen: str = request.param
    return chosen
