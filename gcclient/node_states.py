"""What the workers of a node hold back of what they send each other (`node_codec=`), as a part of a checkpoint.

What may live here: its keys and texts, reading and checking them, its way to and from models. What may not: what a
codec does with it (`node_codec.py`), what daemons hold back (`saved.py`, `checkpoint.py`).

    rank <r>/<model>/node                          JSON of a SavedNode; each worker's own
    rank <r>/<model>/node/<tensor>[<first>:<last>] float32: the residual of these elements, which another worker sums up
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import torch

from gcclient.domain import Domain
from gcclient.errors import StateMismatch
from gcproto.agreed import MAX_ORIGIN, MAX_STEPS_BEFORE
from gcproto.states import Standing

if TYPE_CHECKING:
    from gcclient.node_codec import NodeCodec
    from gcclient.session import Session

log = logging.getLogger("gcclient")
#: (tensor, its first element, the one after its last)
Piece = tuple[str, int, int]
_END: Final = "/node"
NEWEST: Final = "load the checkpoint with the release that saved it, or save it again"


class SavedNode(msgspec.Struct, frozen=True):
    """``local``: the ranks of the node, of which the first ``shards`` sum up parts; ``steps``: exchanges of the model
    so far; ``origin``: what chance draws from, as hexadecimal digits; ``parts``: of which there are residuals."""

    codec: str
    local: tuple[int, ...]
    shards: Annotated[int, msgspec.Meta(ge=1)]
    origin: str
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS_BEFORE)]
    parts: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """One model's. ``values``: float32 by part, on the CPU."""

    about: SavedNode
    values: dict[Piece, torch.Tensor]


class Within:
    """A session's models with such a codec, and what was loaded of them and of others (``loaded``, by label)."""

    def __init__(self, session: Session, stands: Callable[[Domain], Standing], lose: Callable[..., None]) -> None:
        """``stands``: what the daemon says of a domain. ``lose(label, why, count, what, late)``: raises StateMismatch
        where that is asked for."""
        self._session, self._stands, self._lose = session, stands, lose
        self.loaded: dict[str, Held] = {}
        # Kept as daemons keep theirs: a checkpoint has what was declared, whether or not the model is still there.
        self._models: list[NodeCodec] = []

    def collect(self) -> dict[str, Any]:
        """What this worker puts into a checkpoint. Waits until the last step is over; raises the job's failure."""
        session, held, out = self._session, dict(self.loaded), dict[str, Any]()
        for model in self._models:
            session.wait_for(model.settled.is_set, f"{model.label} to settle", "checkpoint", session.patience)
            held[model.label] = model.held()
        for label, known in held.items():
            out |= write(session.me.rank, label, known)
        return out

    def declare(self, label: str, model: NodeCodec | None, agreed: Domain, place: torch.device) -> None:
        """A model is declared in shards, with a codec within nodes or without: it goes on from what was saved of it.
        Raises StateMismatch, and the job's failure."""
        held = self.loaded.pop(label, None)
        if held is not None and (why := _why_not(held, model)):
            what = f"what node_codec={held.about.codec!r} held back"
            self._lose(label, why, len(held.about.parts), what, late=True)
            held = None
        if model is None:
            return
        self._models.append(model)
        if held is None:
            found = self._stands(agreed).resumed
            model.origin = self._session.job.job if found is None else found.origin
            return
        if held.about.codec != model.spec:
            log.info("%s: saved with node_codec=%r, goes on with %r", label, held.about.codec, model.spec)
        model.take(held, place)


def _why_not(held: Held, model: NodeCodec | None) -> str:
    """Why nothing of what was saved fits a model; empty if all of it does."""
    if model is not None:
        return model.why_not(held)
    spec = held.about.codec
    return f"node_codec={spec!r} held something back, and none is given now" if held.about.parts else ""


def write(rank: int, label: str, held: Held) -> dict[str, Any]:
    """What a worker puts into a checkpoint of a model."""
    key = _key(rank, label)
    tensors = {_part_key(key, piece): values for piece, values in held.values.items()}
    return {key: msgspec.json.encode(held.about).decode(), **tensors}


def read(state: Mapping[str, Any], rank: int) -> dict[str, Held]:
    """What there is for ``rank``, by model. Raises StateMismatch."""
    found, begin = {}, f"rank {rank}/"
    for key in state:
        if isinstance(key, str) and key.startswith(begin) and key.endswith(_END):
            about = _about(state, key)
            values = {piece: _values(state, _part_key(key, piece), piece) for piece in about.parts}
            found[key.removeprefix(begin).removesuffix(_END)] = Held(about, values)
    return found


def _key(rank: int, label: str) -> str:
    return f"rank {rank}/{label}{_END}"


def _part_key(key: str, piece: Piece) -> str:
    name, first, last = piece
    return f"{key}/{name}[{first}:{last}]"


def _about(state: Mapping[str, Any], key: str) -> SavedNode:
    try:
        about = msgspec.json.decode(state[key], type=SavedNode)
        if not 1 <= (length := len(bytes.fromhex(about.origin))) <= MAX_ORIGIN:
            raise ValueError(f"origin: expected 1 to {MAX_ORIGIN} bytes, got {length}")
    except (TypeError, ValueError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        kind = SavedNode.__name__
        raise StateMismatch(f"{key}: expected the JSON text of a {kind}: {error}", advice=NEWEST) from None
    return about


def _values(state: Mapping[str, Any], key: str, piece: Piece) -> torch.Tensor:
    tensor, n = state.get(key), piece[2] - piece[1]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float32 or tensor.shape != (n,):
        got = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            got = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise StateMismatch(f"{key}: expected torch.float32 of shape [{n}], got {got}", advice=NEWEST)
    values = tensor.detach().cpu().contiguous()
    if not bool(values.isfinite().all()):
        raise StateMismatch(f"{key}: what is saved of {piece[0]!r} is not finite", advice=NEWEST)
    return values
