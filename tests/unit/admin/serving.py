"""A service in a thread of its own, for clients that block, as gcctl does.

What may live here: starting and stopping. What may not: what is asked of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gcserver.admin.access import OPEN, Access
from gcserver.admin.logs import LogRing
from gcserver.admin.service import AdminServer, serve
from tests.unit.admin.source import FixedSource

T = TypeVar("T")


@contextmanager
def serving(
    source: FixedSource, address: str = "127.0.0.1:0", access: Access = OPEN, ring: LogRing | None = None
) -> Iterator[AdminServer]:
    """A running server; its loop has nothing else to do."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        server = do(serve(source, address, access, ring))
        try:
            yield server
        finally:
            do(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
