"""The one session of this process and what users call on it.

What may live here: `init`/`shutdown`, push_pull and questions, each a thin layer over a session. What may not:
protocol, copies, other exchanges of tensors (`reductions.py`, `transfers.py`).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from gcclient import advice, arguments, autostart, master_store, plain, rendezvous
from gcclient.calls import Call, Calls
from gcclient.errors import NoAdvice, NotInitialized
from gcclient.plain import Plain, PlainCall, PlainCalls
from gcclient.ranks import World, find_label, find_world
from gcclient.session import Session
from gcproto import modes
from gcproto.paths import default_socket
from gcproto.switches import read_switch

_session: Session | Plain | None = None
_calls: Calls | PlainCalls | None = None

Result = TypeVar("Result", covariant=True)


class Handle(Protocol[Result]):
    """What asynchronous calls return."""

    @property
    def arrived(self) -> bool: ...

    def finish(self) -> Result: ...


#: How long init() waits for the other ranks unless ``deadline`` says otherwise, seconds (torch's group timeout).
JOIN_FOR = 1800.0


def init(
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    *,
    job: str | None = None,
    socket: str | None = None,
    deadline: float | str | None = None,
    on_loss: str | None = None,
    seed: int | None = None,
    plan: str | None = None,
    quality: str | None = None,
    controller: str | None = None,
) -> None:
    """Join the job through this node's daemon; returns once all ranks have. Must be called on every rank.

    Ranks come from the arguments, else from an initialised torch.distributed, else from torchrun's, Slurm's or Open
    MPI's variables, else this is process 0 of 1. ``job`` is the job's name (GC_JOB; two jobs at once on one daemon need
    different ones), ``socket`` the daemon's socket (GC_NODE_SOCKET), ``deadline`` (GC_JOB_DEADLINE) the longest any
    rank waits for another, seconds or text such as "30s", "5m" (rank 0's counts; default: the daemon's job.deadline),
    ``on_loss`` (GC_JOB_ON_LOSS) the job's policy, ``seed`` (GC_SEED; rank 0's counts) what codecs that draw random
    numbers draw from: with the same one a run can be repeated bit by bit (default: drawn afresh for every job).
    ``plan`` (GC_PLAN; rank 0's counts) says who makes the job's plans: "static" (operators), "auto" (the planner), or
    one of its parts ("espresso", "mergecomp", "lgreco"); ``quality`` (GC_QUALITY; rank 0's counts) what automatic plans
    may lose: "safe", "balanced" or "fast"; ``controller`` (GC_CONTROLLER; rank 0's counts) what steers compression
    while the job runs: "dc2-da1" to "dc2-da5", with parameters in parentheses, or "none" (default of all three:
    plan.mode, plan.quality and plan.controller of rank 0's daemon). GC_JOB_TOKEN, if set, is a secret of the job:
    daemons let only workers with the same one join (default: drawn by rank 0 where ranks meet in torch's store).
    GC_AUTOSTART=1: where nobody names a socket, the job has a private daemon on this machine, which its first worker
    here starts and which ends with the last; on several machines its daemons have keys by GC_JOB_SECRET. GC_DISABLE=1:
    there is no daemon, and every call of gcclient uses torch's own collectives.

    Raises TypeError and ValueError that name the argument (ranks that do not fit, no duration, no seed, no such word),
    :class:`~gcclient.NoDaemon`, :class:`~gcclient.NotAuthorised`, :class:`~gcclient.JoinRefused`,
    :class:`~gcclient.Draining`.
    A second call before ``shutdown()`` does nothing while the job is healthy; after a failure it leaves the failed job
    and joins anew.
    """
    global _session, _calls
    if _session is not None:
        if _session.failure is None and _session.pid == os.getpid():
            return
        shutdown()
    environ = os.environ
    rank, world_size = arguments.read_optional(rank, "rank"), arguments.read_optional(world_size, "world_size")
    local_rank = arguments.read_optional(local_rank, "local_rank")
    local_size = arguments.read_optional(local_size, "local_size")
    world = find_world(rank, world_size, local_rank, local_size, environ, _distributed())
    label = arguments.read_setting(job, "job", environ, "GC_JOB") or find_label(environ, world)
    terms = arguments.Terms(
        arguments.read_limit(deadline, environ),
        arguments.read_setting(on_loss, "on_loss", environ, "GC_JOB_ON_LOSS"),
        arguments.read_seed(seed, environ),
        arguments.read_word(plan, "plan", environ, "GC_PLAN", modes.MODES),
        arguments.read_word(quality, "quality", environ, "GC_QUALITY", modes.QUALITIES),
        arguments.read_setting(controller, "controller", environ, "GC_CONTROLLER"),
    )
    token = arguments.read_setting(None, "token", environ, "GC_JOB_TOKEN")
    patience = terms.deadline or JOIN_FOR
    if read_switch("GC_DISABLE", environ):
        _session = plain.join(label, world, patience)
        _calls = PlainCalls(_session)
        return
    socket = socket or environ.get("GC_NODE_SOCKET")
    if not socket:
        private = read_switch("GC_AUTOSTART", environ)
        socket = autostart.socket_for(label, world.size) if private else default_socket()
    session = Session(label, socket)
    try:
        session.connect()
        introduction = rendezvous.Introduction(token=rendezvous.digest(token))
        ours = rank is None and world.size > 1
        store = rendezvous.find_store(patience) if ours else None
        at = master_store.address(world, environ) if ours and store is None else None
        if store is not None or at is not None:
            identity = session.who()
            drawn = rendezvous.draw(world.rank, token)
            mine = rendezvous.Place(identity.node, identity.address, identity.key, drawn, rendezvous.machine())
            if at is None:
                places = rendezvous.meet(store, rendezvous.prefix(label), world.rank, world.size, mine, patience)
            else:
                places = master_store.meet(at, f"gradcomm/{label}", world, mine, patience)
            introduction = rendezvous.introduce(places, world.rank, token)
            if local_rank is None and local_size is None:
                world = World(world.rank, world.size, *rendezvous.local_part(places, world.rank), world.source)
        session.register(world, introduction, terms, patience)
    except BaseException:
        session.close(orderly=False)
        raise
    _session, _calls = session, Calls(session)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _distributed() -> tuple[int, int] | None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def shutdown() -> None:
    """Leave the job in good order. Handles not synchronized by then fail. Also called at exit.

    Parameters that are still awaited (``overlap_forward=True``) are stepped first; raises what that raises.
    """
    global _session, _calls
    session, _session, _calls = _session, None, None
    if session is None or session.pid != os.getpid():
        return
    try:
        for each in list(session.leaving) if isinstance(session, Session) and session.failure is None else ():
            each.finish()
    finally:
        session.close(orderly=True)


def _at_exit() -> None:
    global _session, _calls
    if _session is not None and _session.pid == os.getpid() and getattr(sys, "last_value", None) is not None:
        # An exception ends this process: the others should hear of it now, not after their deadline.
        session, _session, _calls = _session, None, None
        session.close(orderly=False)
    else:
        shutdown()


def _after_fork() -> None:
    global _session, _calls
    autostart.let_go()
    if isinstance(_session, Session):
        _session.daemon.abandon()
    _session, _calls = None, None


os.register_at_fork(after_in_child=_after_fork)


def joined() -> Session | Plain:
    """This process's session. Raises :class:`~gcclient.NotInitialized`."""
    if _session is None:
        raise NotInitialized("gcclient is not initialised in this process", advice="call gcclient.init() first")
    return _session


def is_current(session: Session | Plain) -> bool:
    """Whether this process still is in the job that it joined by ``session``."""
    return session is _session


def current() -> Session:
    """This process's session with its daemon. Raises :class:`~gcclient.NotInitialized`, also where there is none."""
    session = joined()
    if isinstance(session, Plain):
        raise NotInitialized("this process has no daemon: GC_DISABLE=1", advice="unset GC_DISABLE before init()")
    return session


def current_calls() -> Calls | PlainCalls:
    """This process's calls. Raises :class:`~gcclient.NotInitialized`."""
    joined()
    assert _calls is not None
    return _calls


def is_initialized() -> bool:
    """Whether ``init()`` was called (and ``shutdown()`` was not)."""
    return _session is not None


def rank() -> int:
    """This process's place among the ranks of the job: its global rank, less one for each lower one that was lost."""
    session = joined()
    return session.membership.ranks.index(session.me.rank)


def size() -> int:
    """The number of ranks in the job; lost ones (``on_loss="shrink"`` or ``"skip"``) count once they are back."""
    return len(joined().membership.ranks)


def on_change(callback: Callable[[int, tuple[int, ...]], None]) -> None:
    """Have ``callback(epoch, ranks)`` called whenever the job goes on without a lost node, or with one that is back.

    ``ranks``: those that are in it, by their numbers at the start of the job. It is called by the thread that reads the
    daemon's messages, so it must be short and must not push; what it raises is logged. What a step was averaged over is
    decided by the daemon for the whole step, whether or not this was called before its result came.
    """
    joined().membership.callbacks.append(callback)


def admit() -> tuple[int, ...]:
    """Let nodes that were lost come back into the job, if any wait; returns their ranks by their first numbers.

    Call it on every rank at the same place of the program, at the end of a step: it costs the exchange of one number,
    or nothing with ``on_loss="fail"``. A worker of a lost node waits in :func:`init` for it. Where ranks came back, all
    go on as after the start of a job: let everybody have parameters, optimizer state and whatever else training needs
    by broadcasts from :func:`root_rank`; the worker that came back does the same first thing after ``init()``. Who
    waits may have given up meanwhile: then nobody came.

    Raises RuntimeError while results are awaited, and the job's failure.
    """
    return current_calls().admit()


def root_rank() -> int:
    """The rank to broadcast from, by its number at the start of the job: the lowest of those that have been in the job
    the longest. 0 until a rank is lost."""
    return joined().membership.eldest


def local_rank() -> int:
    """This process's place among the ranks that share its daemon."""
    return joined().me.local_rank


def local_size() -> int:
    """The number of ranks that share this process's daemon."""
    return joined().me.local_size


# ------------------------------------------------------------------------------------------ push_pull
def push_pull(
    tensor: torch.Tensor, name: str | None = None, average: bool = True, *, compression: str | None = None
) -> torch.Tensor:
    """The average (or sum) of ``tensor`` over all ranks, as a new tensor on the same device.

    Any shape, also non-contiguous or empty; float32, float16, bfloat16, float64, and, with ``average=False``,
    int8..int64, uint8 and bool, whose sum is exact in their own type (it wraps; for bool it is the logical or).
    ``name`` makes it the same tensor from call to call: the daemon's codec, or that of ``compression``, and its error
    feedback apply to it. Unnamed tensors are exchanged losslessly. All ranks must make the same calls in the same
    order, with the same ``compression``. ``name`` and ``average`` may change places, as BytePS has them. Not
    differentiable.
    Raises TypeError (a ``name`` that is no text, a DTensor), ValueError (what cannot be exchanged, averaged or
    compressed so) and the job's failure (:class:`~gcclient.GradcommError`).
    """
    return current_calls().start(tensor, name, average, in_place=False, codec=compression).finish()


def push_pull_(
    tensor: torch.Tensor, name: str | None = None, average: bool = True, *, compression: str | None = None
) -> torch.Tensor:
    """:func:`push_pull` into ``tensor`` itself, which is returned."""
    current_calls().start(tensor, name, average, in_place=True, codec=compression).finish()
    return tensor


def empty(name: str, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised CPU tensor called ``name`` that lives in the daemon's shared memory.

    ``shape``: dimensions, or one tuple of them. Pushed by ``push_pull(t)`` or, to have the result in its place,
    ``push_pull_(t)``, it is not copied on its way to the daemon; otherwise it is a tensor like any other, and stays
    usable after :func:`shutdown`. From a push to its result it must not be written. All ranks call this together; a
    second call returns the same tensor. Raises TypeError and ValueError for a name, shape or dtype that cannot be
    exchanged, OSError when the memory cannot be mapped, :class:`~gcclient.TensorMismatch` on every rank when shapes or
    dtypes differ.
    """
    return current_calls().empty(name, shape, dtype)


def push_pull_async(
    tensor: torch.Tensor, name: str | None = None, average: bool = True, *, compression: str | None = None
) -> Call | PlainCall:
    """:func:`push_pull` that returns a handle at once; :func:`synchronize` gives the new tensor.

    ``tensor`` may be changed as soon as this returns. A second push of the same name fetches the first one's
    result before it goes.
    """
    return current_calls().start(tensor, name, average, in_place=False, codec=compression)


def push_pull_async_(
    tensor: torch.Tensor, name: str | None = None, average: bool = True, *, compression: str | None = None
) -> Call | PlainCall:
    """:func:`push_pull_async` whose result replaces the contents of ``tensor`` when it is synchronized."""
    return current_calls().start(tensor, name, average, in_place=True, codec=compression)


def poll(handle: Handle[Any]) -> bool:
    """Whether :func:`synchronize` would return (or raise) without waiting."""
    if not handle.arrived and isinstance(_session, Session):
        _session.daemon.read_now()
    return handle.arrived


def synchronize(handle: Handle[Result]) -> Result:
    """Wait for the result of an asynchronous call and return it: a tensor, or a list of them for those of a group.

    Raises the job's failure.
    """
    return handle.finish()


def advise(model_or_state: Any = None, bandwidths: Iterable[float | str] = ()) -> advice.Advice:
    """Whether compression pays for a model, from what this node's daemon has measured of it so far.

    ``model_or_state``: a model, a :func:`state` or a :func:`DistributedOptimizer`; default: the job's largest model.
    ``bandwidths``: links to look at besides the measured one, bytes a second a direction or texts such as "1gbit"
    (default: 0.1, 1, 10 and 100 Gbit/s). Changes nothing, and ranks need not call it together. The first call on a
    machine takes some seconds, in which codecs are measured.

    Raises :class:`~gcclient.NoAdvice` (too little has been measured yet: after some ten steps there is advice),
    TypeError, ValueError (a model that was not declared, no bandwidth), and the job's failure.
    """
    session = joined()
    if isinstance(session, Plain):
        raise NoAdvice("nothing is measured: GC_DISABLE=1", job=session.label, advice="train with a daemon first")
    return session.asking.ask(advice.domain_of(session, model_or_state), advice.read_bandwidths(bandwidths))


def stats() -> dict[str, Any]:
    """Counters of this worker since ``init()``: calls, steps, bytes (uncompressed), seconds waited, reconnects.

    ``bytes_within_node``: what it sent other workers of its node for their shards of sums (``hierarchy``), as it went.
    ``audit``: the newest audit's report (see :class:`gcclient.Audit`), None before the first.
    """
    session = joined()
    node, reconnects = ("", 0) if isinstance(session, Plain) else (session.job.node, session.daemon.reconnects)
    c = session.counters
    return {
        "job": session.label,
        "rank": rank(),
        "size": size(),
        "epoch": session.membership.epoch,
        "node": node,
        "calls": c.calls,
        "steps": c.steps,
        "bytes_pushed": c.bytes_pushed,
        "bytes_pulled": c.bytes_pulled,
        "bytes_within_node": c.bytes_within_node,
        "nonfinite_steps": c.nonfinite_steps,
        "skipped_steps": c.skipped_steps,
        "states_dropped": c.states_dropped,
        "wait_seconds": c.wait_seconds,
        "reconnects": reconnects,
        "audit": None if c.audit is None else dict(c.audit),
    }
