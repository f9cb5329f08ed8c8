"""What can go wrong, as exceptions a training script can tell apart.

What may live here: one class per kind of failure, each saying what to do, and the way from a daemon's Fault
to its class. What may not: deciding that something failed.

A failure ends the job: every handle still pending fails with it, and so does every later call until the
next ``init()``. (:class:`NoAdvice` ends nothing: a question had no answer.)
"""

from __future__ import annotations

from gcproto.messages import Fault


class GradcommError(RuntimeError):
    """Base of all errors gcclient raises about communication.

    Attributes (empty or 0 where unknown): ``job`` label, ``domain`` number, ``step``, ``epoch``, ``phase``
    (``join``, ``declare``, ``push``, ``exchange``, ``attach``, ``checkpoint``), ``missing`` names of whoever is waited
    for, ``elapsed`` seconds, ``last_step`` committed everywhere, ``advice`` on what to do next.
    """

    def __init__(
        self,
        message: str,
        *,
        job: str = "",
        domain: int = 0,
        step: int = 0,
        epoch: int = 0,
        phase: str = "",
        missing: tuple[str, ...] = (),
        elapsed: float = 0.0,
        last_step: int = 0,
        advice: str = "",
    ) -> None:
        self.message = message
        self.job = job
        self.domain = domain
        self.step = step
        self.epoch = epoch
        self.phase = phase
        self.missing = missing
        self.elapsed = elapsed
        self.last_step = last_step
        self.advice = advice
        super().__init__(message)

    def __str__(self) -> str:
        facts = []
        if self.job:
            facts.append(f"job {self.job!r}")
        if self.step:
            facts.append(f"step {self.step}")
        if self.epoch:
            facts.append(f"epoch {self.epoch}")
        if self.phase:
            facts.append(f"phase {self.phase}")
        if self.missing:
            facts.append(f"missing {', '.join(self.missing)}")
        if self.elapsed:
            facts.append(f"after {self.elapsed:.1f} s")
        if self.step:
            facts.append(f"last step committed everywhere {self.last_step}")
        text = self.message + (f" [{'; '.join(facts)}]" if facts else "")
        return text + (f". What to do: {self.advice}" if self.advice else "")

    def again(self) -> GradcommError:
        """The same failure as a new exception, so that tracebacks of later calls do not pile up on one."""
        return type(self)(
            self.message,
            job=self.job,
            domain=self.domain,
            step=self.step,
            epoch=self.epoch,
            phase=self.phase,
            missing=self.missing,
            elapsed=self.elapsed,
            last_step=self.last_step,
            advice=self.advice,
        )


class NotInitialized(GradcommError):
    """A call before ``init()`` or after ``shutdown()``. Call ``gcclient.init()`` first."""


class NoDaemon(GradcommError):
    """Nobody answers on the daemon's socket. Start ``gcserver run``, or set GC_NODE_SOCKET to its socket."""


class PeerLost(GradcommError):
    """A node of the job is gone (or this node's daemon did not come back). Restart from the last checkpoint."""


class WorkerLost(GradcommError):
    """A worker process ended without ``shutdown()``. Its own log says why; restart from the last checkpoint."""


class StepTimeout(GradcommError):
    """A wait of the job took longer than its deadline. Look at the named peers; raise job.deadline if they are slow."""


class StepIndeterminate(GradcommError):
    """A step's outcome cannot be learned, so going on might diverge. Restart from the last checkpoint."""


class StepSkipped(GradcommError):
    """A call was given up when a node was lost (``on_loss="skip"``), on all ranks that are left. The job goes on."""


class TensorMismatch(GradcommError):
    """Ranks declared or pushed different tensors. Make the same calls in the same order on every rank."""


class CorruptFrame(GradcommError):
    """Data from a peer was damaged twice; nothing was averaged. Check that machine's network and memory."""


class NotAuthorised(GradcommError):
    """The daemon does not serve this user, does not admit the key of another node, or knows the job by another token.

    Run the worker as the daemon's user, or start a daemon as this one; correct security.peers; give private daemons
    the same GC_JOB_SECRET, and all workers of the job the same GC_JOB_TOKEN. The message says which it was.
    """


class JoinRefused(GradcommError):
    """The job could not be formed. Check RANK, WORLD_SIZE and LOCAL_RANK, and that jobs have different names."""


class Draining(GradcommError):
    """The daemon takes no new jobs. Start the job on another node, or after the daemon was restarted."""


class NotRegistered(GradcommError):
    """The daemon does not know this worker (any more). Call ``init()`` again."""


class CodecError(GradcommError):
    """A codec's specification cannot be used. The message says what would be accepted."""


class NoAdvice(GradcommError):
    """No advice can be given now; the job goes on. Most likely too little was measured: ask after some ten steps."""


class StateMismatch(GradcommError):
    """A checkpoint cannot be loaded here. The message says what it has and what is declared; nothing has failed."""


class OutOfMemory(GradcommError):
    """Memory does not suffice: shared (enlarge /dev/shm; ``gcserver doctor --params N``) or, if it says so, private."""


class OutOfDescriptors(GradcommError):
    """The daemon or this worker may open no more files. Raise its limit (``ulimit -n``, LimitNOFILE=)."""


_KINDS: dict[str, type[GradcommError]] = {
    c.__name__: c
    for c in (
        PeerLost,
        WorkerLost,
        StepTimeout,
        StepIndeterminate,
        TensorMismatch,
        CorruptFrame,
        NotAuthorised,
        JoinRefused,
        Draining,
        NotRegistered,
        CodecError,
        OutOfMemory,
        OutOfDescriptors,
    )
}


def unanswered(what: str, job: str, step: int, seconds: float) -> StepTimeout:
    """The error of a wait for a result that the daemon should have ended, after so many seconds."""
    return StepTimeout(
        f"no result for {what}",
        job=job,
        step=step,
        phase="exchange",
        elapsed=seconds,
        advice="look at the daemon's log on this node",
    )


def from_fault(fault: Fault, label: str, waited_for: str = "") -> GradcommError:
    """The exception a daemon's Fault stands for; ``label`` is the job's name. An unknown kind is the base class.

    ``waited_for``: what the daemon said last that this worker waits for; a wait for the job to form ends with it.
    """
    kind = _KINDS.get(fault.kind)
    said = f"{fault.message}; waited for {waited_for}" if waited_for and fault.phase == "join" else fault.message
    return (kind or GradcommError)(
        said if kind else f"{fault.kind}: {said}",
        job=label,
        domain=fault.domain,
        step=fault.step,
        epoch=fault.epoch,
        phase=fault.phase,
        missing=fault.missing,
        elapsed=fault.elapsed,
        last_step=fault.last_step,
        advice=fault.advice,
    )
