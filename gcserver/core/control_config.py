"""What a control machine is told at its start.

What may live here: the settings the protocol needs. What may not: where they come from (`gcserver.config`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcproto import messages, modes, wire

#: What becomes of a job that loses a node: it ends; the step under way is skipped; it is run again by the rest.
POLICIES = ("fail", "skip", "shrink")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Who this node is and what its jobs get when they are formed here. Times in seconds."""

    hello: messages.Hello
    incarnation: int
    rules: tuple[messages.Rule, ...]
    partition_bytes: int
    min_compress_bytes: int
    deadline: float
    on_loss: str
    lease: float = 30.0
    quiet_after: float = 3.0
    controller: str = "none"
    mode: str = modes.STATIC
    quality: str = modes.BALANCED
    #: there is an arbiter that survives any single node
    arbiter: bool = False

    def no_policy(self, on_loss: str) -> str:
        """Why a job with this policy cannot be formed here; empty if it can."""
        if on_loss not in POLICIES:
            return f"on_loss={on_loss!r}: expected one of {', '.join(POLICIES)}"
        if on_loss == "fail" or self.arbiter:
            return ""
        return f"on_loss={on_loss!r} needs etcd to decide who is left, and {self.hello.node} has no cluster.etcd"

    @property
    def node(self) -> int:
        return wire.node_id(self.hello.node)
