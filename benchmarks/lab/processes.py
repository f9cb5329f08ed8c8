"""Child processes that cannot outlive their parent: started in a session of their own, ended by pid, always reaped.

What may live here: starting and ending processes, and turning SIGTERM into an ordinary exit so that ``finally`` and
``with`` blocks run. What may not: which programs these are.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import IO, Any, Self

SBIN = ("/usr/sbin", "/sbin")


def which(program: str) -> str | None:
    """The program's path, looked for in sbin too: a user's PATH often lacks it although users may run ``ip``."""
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))


def dies_with_parent(argv: Sequence[str], signum: str = "TERM") -> list[str]:
    """``argv`` such that the kernel sends it ``signum`` when the thread that started it ends, even by SIGKILL.

    setpriv does it (it replaces itself by argv, so the pid stays that of the program); where util-linux has none the
    command is returned as it is, and only an orderly end of the parent ends it.
    """
    setpriv = which("setpriv")
    return [setpriv, "--pdeathsig", signum, "--", *argv] if setpriv else list(argv)


def start(
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
) -> subprocess.Popen[Any]:
    """Popen in a new session: Ctrl-C at a terminal reaches the parent alone, which then ends its children in order."""
    return subprocess.Popen(
        argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=text, start_new_session=True, bufsize=-1
    )


def end(processes: Iterable[subprocess.Popen[Any]], *, grace: float = 5.0) -> list[int]:
    """SIGTERM to all, ``grace`` seconds for all together, SIGKILL to the rest; reaps them.

    Returns the pids that had to be killed. SIGKILL goes to the whole session of such a process, so that what it had
    started itself goes too.
    """
    alive = [p for p in processes if p.poll() is None]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + grace
    killed = []
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            killed.append(process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # start() made it leader of its own group
            process.kill()
            process.wait()
    return killed


class Owner(abc.ABC):
    """Something that starts processes: a context manager that ends them whatever happens, also while it starts."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abc.abstractmethod
    def _open(self) -> None:
        """Starts them; may fail half-way."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends those there are, and removes what they leave behind. Twice is no error."""


@contextlib.contextmanager
def exits_on_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise SystemExit(128 + n) in the main thread, as SIGINT raises KeyboardInterrupt.

    Without it a SIGTERM would end Python on the spot and no clean-up would run. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it SIGINT, SIGTERM and SIGHUP are held back: a second Ctrl-C must not cut a clean-up short."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
