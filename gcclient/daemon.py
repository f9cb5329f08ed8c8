"""Connections to this node's daemon: the supervisor's socket and one for each lane.

What may live here: connecting, reconnecting with backoff, who reads the sockets. What may not: what messages
mean (`session.py`), gradients.

Who reads. A thread that waits for something reads the sockets itself, so that an answer costs one wake-up and
not two; the receiver thread reads while nobody does (futures of DDP, a daemon that restarts while the worker
is busy elsewhere). Both share one epoll set, which the receiver watches through a second one: taking over and
handing back is one system call each.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from gcproto import channel, lane_messages, messages, packed
from gcproto.channel import Channel, ChannelClosed
from gcproto.packed import Message, MessageError

log = logging.getLogger("gcclient")

CONTROL: Final = -1
_BACKOFF_FIRST: Final = 0.02
_BACKOFF_LAST: Final = 1.0
_SAY_LOST_EVERY: Final = 5.0
_LOOK_EVERY: Final = 5.0
#: So many connections in a row that the other side closes without an answer are enough to know that it goes on so.
MAX_UNANSWERED: Final = 5
#: The other side has not read for so long, seconds: what is left to write waits with the receiver thread, and whoever
#: posts goes on to where its waits end.
_UNREAD: Final = 5.0
_UNREAD_AGAIN: Final = 0.1
#: A connection that held this long was no refusal, seconds: an idle lane has nothing to say.
_HELD: Final = 5.0

_to_worker = packed.Decoder[messages.ToWorker](messages.ToWorker)
_to_lane_worker = packed.Decoder[lane_messages.ToLaneWorker](lane_messages.ToLaneWorker)


class Listener(Protocol):
    """Whoever understands the messages. Calls come from whichever thread reads, one at a time."""

    def on_message(self, lane: int, message: Any, descriptors: list[int]) -> None: ...

    def on_connected(self, link: Link) -> None:
        """A link is new: send what must come first. Called with ``link.sending`` held."""

    def on_lost(self, link: Link, seconds: float) -> None:
        """The link has been down for ``seconds``."""

    def on_refused(self, link: Link) -> None:
        """The other side accepts connections and closes them without an answer, MAX_UNANSWERED in a row so far."""

    @property
    def over(self) -> bool:
        """Whether lost connections are wanted no more."""

    def on_quiet(self) -> None:
        """The receiver thread looked around; called at least every few seconds, by that thread."""


class Link:
    """One socket. ``lane`` is CONTROL for the supervisor's.

    ``sending`` orders senders; what must survive a lost connection is recorded under it before
    :meth:`post`, so that ``on_connected`` finds it.
    """

    def __init__(self, lane: int, path: str) -> None:
        self.lane = lane
        self.path = path
        self.channel: Channel[Any] | None = None
        self.sending = threading.RLock()
        self.lost_at = 0.0
        self.retry_at = 0.0
        self.said_at = 0.0
        self.backoff = _BACKOFF_FIRST
        self.why = ""
        #: whether the other side said anything on this connection, and when that was made
        self.answered = False
        self.opened_at = 0.0
        #: how many connections were closed without an answer since the last one that was answered
        self.unanswered = 0

    @property
    def name(self) -> str:
        return "the daemon" if self.lane == CONTROL else f"lane {self.lane} of the daemon"

    def post(self, message: Message) -> None:
        """Send while connected. A connection that breaks is noticed by the reader, who restores it. What the other side
        does not read for long is left to :meth:`go_on`."""
        with self.sending:
            if self.channel is None:
                return
            try:
                self.channel.send(message)
                self._write(self.channel, _UNREAD)
            except ChannelClosed as error:
                self.why = str(error)

    def go_on(self) -> None:
        """Write what is left of what was posted, as far as the other side reads it now."""
        if self.channel is None or not self.channel.backlog or not self.sending.acquire(blocking=False):
            return
        try:
            if self.channel is not None:
                self._write(self.channel, _UNREAD_AGAIN)
        except ChannelClosed as error:
            self.why = str(error)
        finally:
            self.sending.release()

    def _write(self, opened: Channel[Any], patience: float) -> None:
        poller = select.poll()
        poller.register(opened.fileno(), select.POLLOUT)
        while opened.backlog:
            if not poller.poll(1000 * patience):
                log.warning("%s has read nothing for %g s", self.name, patience)
                return
            opened.flush()

    def heard(self) -> bool:
        """Whether the other side has read all that was posted, or is gone."""
        with self.sending:
            if self.channel is None:
                return True
            try:
                return not struct.unpack("i", fcntl.ioctl(self.channel.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            except OSError:
                return True


class Daemon:
    """All links, and the reading of them. ``start`` the receiver thread once; ``close`` ends everything."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.control = Link(CONTROL, "")
        self.lanes: list[Link] = []
        self._by_fd: dict[int, Link] = {}
        self._inner = select.epoll()
        self._outer = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inner.register(self._wake, select.EPOLLIN)
        self._outer.register(self._inner.fileno(), select.EPOLLIN)
        self._reader = threading.Lock()
        self._news = threading.Condition()
        self._followers = 0
        self._down = 0
        self._thread: threading.Thread | None = None
        self.closed = False
        self.reconnects = 0

    # ---------------------------------------------------------------------------------- connecting
    def links(self) -> list[Link]:
        return [self.control, *self.lanes]

    def connect(self, path: str) -> None:
        """Connect to the supervisor. Raises OSError."""
        self.control.path = path
        self._open(self.control)

    def connect_lanes(self, paths: tuple[str, ...]) -> None:
        """Learn (again) where the lanes listen, and connect to those that are not connected."""
        if not self.lanes:
            self.lanes = [Link(i, path) for i, path in enumerate(paths)]
            now = time.monotonic()
            for link in self.lanes:
                try:
                    self._open(link)
                except OSError as error:
                    self._mark_lost(link, str(error), now)
            return
        for link, path in zip(self.lanes, paths, strict=True):
            link.path = path

    def _open(self, link: Link) -> None:
        decode: Callable[[object], Any] = _to_worker if link.lane == CONTROL else _to_lane_worker
        with link.sending:
            link.channel = channel.connect(link.path, decode)
            self._by_fd[link.channel.fileno()] = link
            self._inner.register(link.channel.fileno(), select.EPOLLIN)
            if link.lost_at:
                self._down -= 1
                self.reconnects += 1
                log.info("connected to %s again after %.2f s", link.name, time.monotonic() - link.lost_at)
            link.lost_at = 0.0
            link.answered, link.opened_at = False, time.monotonic()
            self.listener.on_connected(link)

    def _note_answer(self, link: Link) -> None:
        """Only now it is known that the other side takes what it is told first: accepting alone says little."""
        link.answered, link.unanswered, link.backoff = True, 0, _BACKOFF_FIRST

    def _mark_lost(self, link: Link, why: str, now: float) -> None:
        with link.sending:
            if link.channel is not None:
                fd = link.channel.fileno()
                self._by_fd.pop(fd, None)
                self._inner.unregister(fd)
                link.channel.close()
                link.channel = None
                if not link.answered:
                    link.unanswered = link.unanswered + 1 if now - link.opened_at < _HELD else 0
            link.why = why
            if not link.lost_at:
                self._down += 1
            link.lost_at = link.said_at = now
            if link.unanswered:
                self._put_off(link, now)
            else:
                link.backoff, link.retry_at = _BACKOFF_FIRST, now
        log.info("connection to %s lost (%s); connecting again", link.name, why)
        if link.unanswered >= MAX_UNANSWERED:
            self.listener.on_refused(link)

    @staticmethod
    def _put_off(link: Link, now: float) -> None:
        link.retry_at = now + link.backoff
        link.backoff = min(2 * link.backoff, _BACKOFF_LAST)

    def _retry(self) -> None:
        now = time.monotonic()
        for link in self.links():
            if self.listener.over:
                return
            if link.channel is not None or not link.lost_at or now < link.retry_at:
                continue
            try:
                self._open(link)
            except OSError as error:
                link.why = str(error)
                link.unanswered = 0  # it is away, and refuses nobody
                self._put_off(link, now)
                if now - link.said_at >= _SAY_LOST_EVERY:
                    link.said_at = now
                    log.warning("%s at %s does not answer since %.0f s: %s", link.name, link.path,
                                now - link.lost_at, link.why)  # fmt: skip
                self.listener.on_lost(link, now - link.lost_at)

    def _until_retry(self) -> float | None:
        if not self._down or self.listener.over:
            return None
        due = [k.retry_at for k in self.links() if k.channel is None and k.lost_at]
        return max(0.0, min(due) - time.monotonic()) if due else None

    # -------------------------------------------------------------------------------------- reading
    def _read(self, timeout: float | None) -> None:
        """One round of reading; the caller holds ``_reader``."""
        retry = self._until_retry()
        if retry is not None and (timeout is None or retry < timeout):
            timeout = retry
        for fd, _ in self._inner.poll(timeout):
            link = self._by_fd.get(fd)
            if link is None or link.channel is None:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                continue
            try:
                batch = link.channel.receive()
            except (ChannelClosed, MessageError) as error:
                self._mark_lost(link, str(error), time.monotonic())
                continue
            if batch and not link.answered:
                self._note_answer(link)
            # Descriptors come with whatever message ended the read; the listener asks for them in order.
            descriptors = [d for _, ds in batch for d in ds]
            for message, _ in batch:
                self.listener.on_message(link.lane, message, descriptors)
                if descriptors:
                    descriptors = []
        if self._down:
            self._retry()

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Read, or let another thread read, until ``ready()`` or ``timeout`` seconds. Returns ``ready()``."""
        end = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if end is None else end - time.monotonic()
            if (left is not None and left <= 0) or self.closed:
                return ready()
            if self._reader.acquire(blocking=False):
                try:
                    self._lead(ready, end)
                finally:
                    self._reader.release()
                    self._tell_followers()
            else:
                with self._news:
                    self._followers += 1
                    # Looked at again under the lock: the reader may have delivered in between.
                    if not ready() and self._reader.locked():
                        self._news.wait(left)
                    self._followers -= 1
        return True

    def _lead(self, ready: Callable[[], bool], end: float | None) -> None:
        inner = self._inner.fileno()
        self._outer.modify(inner, 0)
        try:
            while not ready() and not self.closed:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._read(left)
                if self._followers:
                    self._tell_followers()
        finally:
            if not self.closed:
                self._outer.modify(inner, select.EPOLLIN)
                if self._down:
                    self.wake()

    def _tell_followers(self) -> None:
        if self._followers:
            with self._news:
                self._news.notify_all()

    def read_now(self) -> None:
        """Take in what has arrived, without waiting."""
        if not self.closed and self._reader.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._reader.release()
                self._tell_followers()

    def wake(self) -> None:
        """Let whoever reads look around."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gcclient-receiver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        look_at = 0.0
        while not self.closed:
            retry = self._until_retry()
            self._outer.poll(_LOOK_EVERY if retry is None else min(retry, _LOOK_EVERY))
            if self.closed:
                return
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_EVERY
                self.listener.on_quiet()
                for link in self.links():
                    link.go_on()
            if self._reader.acquire(blocking=False):
                try:
                    self._read(0)
                except Exception:
                    # The thread must live on: it is what notices a daemon that restarts.
                    log.exception("the receiver met an unexpected error")
                    time.sleep(0.1)
                finally:
                    self._reader.release()
                    self._tell_followers()
            elif self._down:
                time.sleep(_BACKOFF_FIRST)

    # ---------------------------------------------------------------------------------------- ending
    def close(self) -> None:
        """Close all sockets and end the receiver thread."""
        if self.closed:
            return
        self.closed = True
        self.wake()
        with self._news:
            self._news.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        with self._reader:
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: for a forked child, which must not keep the parent's sockets
        open (the daemon learns of a worker's death by them)."""
        self.closed = True
        for link in self.links():
            if link.channel is not None:
                link.channel.close()
                link.channel = None
        self._inner.close()
        self._outer.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
