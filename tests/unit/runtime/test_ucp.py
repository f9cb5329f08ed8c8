"""libucp that is not there, or is too old.

What may live here: what `gcserver/runtime/ucp.py` and `gcserver/checks_ucx.py` say then; they are tested with a library
in `tests/system/test_ucx.py`. What may not: anything that needs one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import cffi
import pytest

from gcserver import checks_ucx, config, doctor
from gcserver.runtime import ucp
from gcserver.runtime.transports import lane_transport
from tests.unit.runtime.test_lanes import a_setup


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    ucp.load.cache_clear()
    yield
    ucp.load.cache_clear()


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucp, "SONAME", "libucp-that-is-not-there.so.0")


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another time."""

    class Old:
        def ucp_get_version(self, *numbers: Any) -> None:
            for number, value in zip(numbers, (1, 12, 7), strict=True):
                number[0] = value

    monkeypatch.setattr(cffi.FFI, "dlopen", lambda ffi, name: Old())


def test_a_missing_library_is_a_typed_error_with_what_to_do(missing: None) -> None:
    with pytest.raises(ucp.UcpMissing, match=r"cannot be loaded .*not-there.*install Debian's libucx0.*zmq"):
        ucp.load()


def test_an_old_library_is_refused(old: None) -> None:
    with pytest.raises(ucp.UcpMissing, match=r"is of UCX 1\.12\.7, expected 1\.13 or newer; install"):
        ucp.load()


def test_a_lane_that_is_asked_for_ucx_says_so(missing: None) -> None:
    setup: Any = a_setup(transport="ucx")
    context: Any = None
    with pytest.raises(ucp.UcpMissing):
        lane_transport(setup, context, None, print)


def test_a_daemon_does_not_start_without_the_library(missing: None) -> None:
    asked = config.load(flags={"node.transport": "ucx"})
    (found,) = [check for check in doctor.preflight(asked) if check.name == "ucx"]
    assert found.fatal and "cannot be loaded" in found.text and "libucx0" in found.fix
    assert checks_ucx.library(config.load()) == [], "nobody asked for it"


def test_ucx_leaves_signals_that_mean_something_to_a_daemon(missing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads its environment when it is loaded."""
    monkeypatch.delenv("UCX_DEBUG_SIGNO", raising=False)
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(ucp.UcpMissing):
        ucp.load()
    assert ucp.os.environ["UCX_DEBUG_SIGNO"] == "0" and signal.getsignal(signal.SIGHUP) is before
