"""The threads of a model that is exchanged in shards.

What may live here: that they end with it. What may not: tests.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import gcclient


def check_threads_end_with(make: Callable[[], object]) -> None:
    """``make`` gives what holds a model's state, after a step of it."""
    before = set(threading.enumerate())
    made = make()
    mine = [t for t in threading.enumerate() if t not in before and t.name.startswith("gcclient-")]
    assert {t.name for t in mine} == {"gcclient-sums", "gcclient-averages"}
    gcclient.shutdown()  # a session knows its newest steps
    del made
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
