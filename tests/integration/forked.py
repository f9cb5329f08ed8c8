"""Worker processes forked from one that has imported torch, which takes a new interpreter seconds of CPU time each.

What may live here: starting such a process, following it, and how it begins and ends as a script would. What may not:
what it computes, daemons (those are always interpreters of their own).
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from gcserver import parent

#: What workers and daemons import anyway: torch loads `torch._dynamo`, the longer part, with the first optimizer.
#: Nothing here may start a thread when it is imported, or read what tests change in the environment.
PRELOADED = (
    "torch.nn.parallel",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "gcclient",
    "tests.integration.forked_daemon",
)


#: has a process write the stacks of its threads to its log
TELLS_STACKS = signal.SIGUSR1

#: In a new process: it is killed when the one that started it ends, whatever ends that.
ends_with_parent = functools.partial(parent.ends_with_parent, signal.SIGKILL)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Forked:
    """``main()`` in a process of its own, followed as a ``subprocess.Popen`` would be.

    main: picklable. environ: all of its environment. cwd: its folder. log: what both its outputs are added to.
    """

    def __init__(self, main: Callable[[], None], environ: Mapping[str, str], cwd: Path, log: Path) -> None:
        log.touch()  # there even if the process ends before it could write
        self._process = _context().Process(target=_script, args=(main, dict(environ), str(cwd), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return status

    def tell_stacks(self) -> None:
        """Have the stacks of its threads in its log, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, TELLS_STACKS)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _script(main: Callable[[], None], environ: dict[str, str], cwd: str, log: str) -> None:
    """In the process: ``main`` as ``__main__`` of an interpreter would run, from its environment to its exit."""
    ends_with_parent()
    # The forking process ends when nobody holds the other end of this pipe: its own children must not keep it alive.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(TELLS_STACKS)
    import torch

    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", "1")))  # torch reads the variable when it is imported
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # which tells exit handlers why
        sys.excepthook(*sys.exc_info())
        status = 1
    # multiprocessing leaves a process without what an interpreter does at its end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
