"""UCX's own thread, and holding it still.

What may live here: that one thread. What may not: the rest of libucp (`ucp.py`).

UCX has one thread a process, in which it accepts connections and reads who is there, whatever the loop does meanwhile.
Of who was accepted and has not said yet who it is, that thread knows the listener, also when the listener is gone: UCX
1.13 forgets such a connection with the worker only, and what is read of it between the two calls, or in the course of
one, ends the process. (Later releases lock the listener alone.) There is no call that stops the thread, so it is called
into a handler of ours, and kept there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gcserver.runtime.ucp import Library

DECLARATIONS: Final = """
ucs_status_t ucs_async_set_event_handler(
    int mode, int event_fd, int events, void (*cb)(int id, int events, void *arg), void *arg, void *async);
ucs_status_t ucs_async_remove_handler(int id, int sync);
"""

log = logging.getLogger("gcserver")
# By the names of ucs/async: UCS_ASYNC_MODE_THREAD_SPINLOCK, UCS_EVENT_SET_EVREAD.
_THREAD, _READABLE = 1, 1
#: Longer than a thread that lives takes to come, however busy the machine, seconds.
_PATIENCE: Final = 10.0


class UcxThread:
    """The thread, while a context lives. Raises UcpError."""

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        #: the present holding, as: the thread is here, the thread may go
        self._holding: tuple[Event, Event] | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        null = lib.ffi.NULL
        self._on_bell: Any = lib.ffi.callback("void (*)(int, int, void *)", self._called)
        try:
            lib.check(lib.ucs.ucs_async_set_event_handler(_THREAD, self._bell, _READABLE, self._on_bell, null, null))
        except BaseException:
            os.close(self._bell)
            raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """In here UCX's thread does nothing. For one caller at a time; of several contexts one waits for another."""
        here, go = self._holding = Event(), Event()
        os.eventfd_write(self._bell, 1)
        try:
            if not here.wait(_PATIENCE):
                log.warning("UCX's thread did not answer within %g s; going on beside it", _PATIENCE)
            yield
        finally:
            go.set()

    def _called(self, bell: int, _events: int, _arg: object) -> None:
        with suppress(BlockingIOError):  # another's event, whose descriptor had the same number
            os.eventfd_read(bell)
        assert self._holding is not None
        here, go = self._holding
        here.set()
        go.wait()

    def close(self) -> None:
        self._lib.ucs.ucs_async_remove_handler(self._bell, 1)
        os.close(self._bell)
        self._on_bell = None
