"""The command `gcrun`: run a job with a private daemon that lives for as long as the job.

What may live here: arguments, the command's process, its signals and its end. What may not: the daemon (`private.py`,
`keeper.py`).

    gcrun -- torchrun --nproc-per-node 2 train.py

Exit status: the command's, also where a signal ended it; 1 the daemon did not start, 2 the command line or the
configuration is wrong, 126 and 127 the command cannot be run or does not exist, as a shell says it.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from gcproto.switches import read_switch
from gcserver import cli, commandline, derivedkeys, private
from gcserver.config import ConfigError
from gcserver.copies import around_caches
from gcserver.parent import ends_with_parent

_FAILED: Final = 1
_CANNOT_RUN: Final = 126
_NOT_FOUND: Final = 127
#: What is passed on to the command.
PASSED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH, signal.SIGCONT,
)  # fmt: skip
#: of a signal that a terminal sent, to the command as well
_SI_KERNEL: Final = 0x80
#: a daemon that drains for longer than this says what for, seconds
_QUIET: Final = 3.0


def parser() -> argparse.ArgumentParser:
    top = commandline.Parser(
        prog="gcrun", allow_abbrev=False, usage="gcrun [--KEY VALUE ...] -- COMMAND [ARGUMENT ...]",
        description="run a command with a gradcomm daemon of its own, which ends with it",
        epilog="Keys are those of `gcserver run`; a node.listen with port 0 means a free one. Other machines reach the "
        "daemon only at an address of this one, with GC_JOB_SECRET, with security.key and security.peers, or with "
        "--insecure.",
    )  # fmt: skip
    cli.add_keys(top)
    top.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, and its arguments")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. Ends this process by the signal that ended the command, if one did."""
    private.open_streams()
    top = parser()
    options = top.parse_args(argv)
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        top.error("expected a command, as in: gcrun -- python train.py")
    try:
        if read_switch("GC_DISABLE", os.environ):
            return _become(command)
        file, flags = cli.said(options)
        daemon = private.start(flags, os.environ, file)
    except (ConfigError, ValueError) as error:
        return _complain(str(error), commandline.USAGE)
    except (private.StartError, OSError) as error:
        return _complain(str(error), _FAILED)
    except KeyboardInterrupt:
        # The first start of a release takes a minute. Without this process the keeper clears up.
        return _complain("interrupted", cli.INTERRUPTED)
    status = _run(command, daemon)
    os.close(daemon.hold)
    _wait(daemon)
    if status < 0:
        _end_by(-status)
    return status


def _run(command: list[str], daemon: private.Private) -> int:
    """Run the command until it ends; its exit status, negative for a signal."""
    watched = {*PASSED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    cores = os.sched_getaffinity(0) - set(daemon.cores)
    launcher = os.getpid()

    def prepare() -> None:
        # It is to end with this process, whatever ends that; torchrun ends its workers when it is told so.
        ends_with_parent(signal.SIGTERM)
        if os.getppid() != launcher:
            os._exit(_FAILED)
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    environ = {**os.environ, **around_caches(os.environ), "GC_NODE_SOCKET": str(daemon.socket)}
    derivedkeys.take(environ)  # the daemon has it
    if daemon.admin:
        environ["GC_NODE_ADMIN"] = daemon.admin
    try:
        process = subprocess.Popen(command, env=environ, preexec_fn=prepare)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _not_run(command, error)
    kept = True
    while process.poll() is None:
        if kept and daemon.keeper.poll() is not None:
            kept = False
            _complain(
                f"the daemon is gone (status {daemon.keeper.returncode}): the job cannot exchange any more", _FAILED
            )
        told = signal.sigwaitinfo(watched)
        if told.si_signo != signal.SIGCHLD and told.si_code != _SI_KERNEL:
            process.send_signal(told.si_signo)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def _wait(daemon: private.Private) -> None:
    """Until the daemon is drained and its folder gone. Interrupted, it leaves that to the keeper."""
    try:
        try:
            daemon.keeper.wait(_QUIET)
        except subprocess.TimeoutExpired:
            print("gcrun: waiting for the other nodes to leave the job", file=sys.stderr, flush=True)
            daemon.keeper.wait()
    except KeyboardInterrupt:
        pass


def _become(command: list[str]) -> int:
    """Be the command: there is nothing to look after."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return _not_run(command, error)


def _not_run(command: list[str], error: OSError) -> int:
    status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN
    return _complain(f"{command[0]}: {error.strerror}", status)


def _end_by(number: int) -> None:
    """End as the command did, so that whoever waits for this process sees the same; without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _complain(text: str, status: int) -> int:
    print("gcrun:", " ".join(text.split()), file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
