"""What a control machine is told at its start.

What may live here: the settings the protocol needs. What may not: where they come from (`gcserver.config`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcproto import messages, modes, wire


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

    @property
    def node(self) -> int:
        return wire.node_id(self.hello.node)
