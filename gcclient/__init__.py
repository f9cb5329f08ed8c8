"""gcclient: the torch side, a thin library that hands gradients to the daemon and takes back the average.

What lives here: the session, the arena as the worker sees it, the DDP hook and what torch users call.
What may not: any import of `gcserver` and its dependencies; nobody wants those in a training environment.

    import gcclient
    gcclient.init()
    state = gcclient.state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
"""

try:
    import torch as _torch
except ImportError as error:  # torch is the user's own, and no requirement of the package
    raise ImportError("gcclient needs torch (2.8 or newer), which is not installed in this environment") from error

from gcclient.advice import Advice, AdviceRow
from gcclient.api import (
    admit,
    advise,
    empty,
    init,
    is_initialized,
    local_rank,
    local_size,
    on_change,
    poll,
    push_pull,
    push_pull_,
    push_pull_async,
    push_pull_async_,
    rank,
    root_rank,
    shutdown,
    size,
    stats,
    synchronize,
)
from gcclient.attaching import attach
from gcclient.audit import Audit
from gcclient.backend import register as _register
from gcclient.ddp import ddp_hook, state
from gcclient.errors import (
    CodecError,
    CorruptFrame,
    Draining,
    GradcommError,
    JoinRefused,
    NoAdvice,
    NoDaemon,
    NotAuthorised,
    NotInitialized,
    NotRegistered,
    OutOfDescriptors,
    OutOfMemory,
    PeerLost,
    StateMismatch,
    StepIndeterminate,
    StepSkipped,
    StepTimeout,
    TensorMismatch,
    WorkerLost,
)
from gcclient.grouping import bucket_caps
from gcclient.optimizer import DistributedOptimizer
from gcclient.reductions import (
    Average,
    Compression,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from gcclient.replicas import Replicas, fsdp2
from gcclient.state_dicts import load_state_dict, state_dict, state_template
from gcclient.transfers import (
    allgather,
    allgather_object,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

#: BytePS's names for them
push_pull_inplace = push_pull_
push_pull_async_inplace = push_pull_async_

__all__ = [
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "on_change",
    "admit",
    "root_rank",
    "empty",
    "push_pull",
    "push_pull_",
    "push_pull_async",
    "push_pull_async_",
    "push_pull_inplace",
    "push_pull_async_inplace",
    "poll",
    "synchronize",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "Average",
    "Sum",
    "Compression",
    "broadcast",
    "broadcast_",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "allgather",
    "allgather_object",
    "barrier",
    "state",
    "ddp_hook",
    "attach",
    "fsdp2",
    "Replicas",
    "DistributedOptimizer",
    "bucket_caps",
    "Audit",
    "state_dict",
    "load_state_dict",
    "state_template",
    "stats",
    "advise",
    "Advice",
    "AdviceRow",
    "GradcommError",
    "NotInitialized",
    "NoDaemon",
    "NoAdvice",
    "PeerLost",
    "WorkerLost",
    "StepTimeout",
    "StepIndeterminate",
    "StepSkipped",
    "TensorMismatch",
    "CorruptFrame",
    "NotAuthorised",
    "JoinRefused",
    "Draining",
    "NotRegistered",
    "CodecError",
    "StateMismatch",
    "OutOfMemory",
    "OutOfDescriptors",
]

_register()

_major, _minor = (int(part) for part in _torch.__version__.split(".")[:2])
if (_major, _minor) < (2, 8):
    import warnings as _warnings

    _warnings.warn(f"gcclient is tested with torch 2.8 and newer, this is {_torch.__version__}", stacklevel=2)
