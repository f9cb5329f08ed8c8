"""UCX's own thread is held still, by one at a time, and goes on.

What may live here: contexts of the real library. What may not: transports. Needs the system's libucp (Debian's
libucx0).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from gcserver.runtime.ucp import Context
from tests.system.ucx import needs_ucx

pytestmark = [pytest.mark.system, needs_ucx]

#: For what is to happen, and for what is not to, seconds.
SOON, NEVER = 20.0, 0.2


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = Context("lo")
    yield made
    made.close()


def test_one_holds_it_at_a_time(context: Context) -> None:
    other, held = Context("lo"), threading.Event()

    def hold() -> None:
        with other.thread.held():
            held.set()

    second = threading.Thread(target=hold)
    with context.thread.held():
        second.start()
        assert not held.wait(NEVER)
    assert held.wait(SOON)
    second.join()
    other.close()


def test_it_goes_on_after_whatever_happened_while_it_was_held(context: Context) -> None:
    for _ in range(50):
        with pytest.raises(LookupError), context.thread.held():
            raise LookupError


def test_a_context_that_is_closed_leaves_no_descriptor_and_no_thread(context: Context) -> None:
    for _ in range(2):  # whatever the library opens once, it has then
        Context("lo").close()

    def counted() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    before = counted()
    for _ in range(20):
        another = Context("lo")
        with another.thread.held():
            pass
        another.close()
    assert counted() < before + 20
