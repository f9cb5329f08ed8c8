"""What is said of how a job ended: what to do, which phase was held up, what other members hear of it.

What may live here: that, by the kind of the fault. What may not: ending a job (`job.py`).
"""

from __future__ import annotations

import msgspec

from gcproto.messages import EpochDecided, Fault

#: What to do where a job cannot go on.
AGAIN = "start the job again from its last checkpoint"
#: What to do where tensors do not fit into a node's memory.
NEED = "`gcserver doctor --params N` prints the need"
NO_SPACE = f"make /dev/shm larger or the model smaller; {NEED}"
#: What to do about a fault that says nothing better.
ADVICE = {
    "TensorMismatch": "let every rank declare and push the same tensors in the same order",
    "CodecError": "write a codec that every node knows, its parameters as in topk(ratio=0.01)",
    "WorkerLost": "its own log says why; start the job again",
}
#: Faults that come from outside the rounds, and the phase they hold up when no lane has said what it waits for.
OUTSIDE = {"PeerLost": "exchange", "WorkerLost": "push", "StepIndeterminate": "commit"}
#: Faults of one node, without which a job that outlives its nodes goes on.
ALONE = frozenset({"WorkerLost", "StepIndeterminate"})


def abroad(fault: Fault, record: EpochDecided, node: str) -> Fault:
    """What members hear of how a job ended on ``node``: where they go on without it, that it is lost."""
    if record.on_loss == "fail" or fault.kind not in ALONE:
        return fault
    return msgspec.structs.replace(fault, kind="PeerLost", missing=(node,))
