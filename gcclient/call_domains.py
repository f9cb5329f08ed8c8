"""Which domain serves a call, and with which codec.

What may live here: the domains of single tensors. What may not: pushing (`calls.py`), models' domains
(`parameters.py`).

Named tensors go through CALLS, where the daemon's codec applies to them. Tensors without a name go through EXACT, which
is always lossless: error feedback belongs to a tensor, and nothing says that the next unnamed call brings the same one.
Named tensors that a call gives a codec of its own go through a domain of that codec.
"""

from __future__ import annotations

from typing import Final

import xxhash

from gcclient import arguments
from gcclient.domain import Domain
from gcclient.parameters import FIRST_MODEL, takes_matrices
from gcclient.session import Session
from gcproto.messages import DeclareDomain

CALLS: Final = 0
EXACT: Final = 1
#: the codec of EXACT
LOSSLESS: Final = "none"


def calls_domain(session: Session) -> Domain:
    """Named calls; one step each."""
    return _domain(session, "calls", CALLS, "")


def exact_domain(session: Session) -> Domain:
    """Unnamed calls and broadcasts: lossless whatever the plan says."""
    return _domain(session, "exact", EXACT, LOSSLESS)


def coded_domain(session: Session, codec: str) -> Domain:
    """Named calls with a codec of their own: as with a model's, a plan may say otherwise."""
    number = max(xxhash.xxh3_64_intdigest(f"calls/{codec}".encode()) & 0x7FFFFFFF, FIRST_MODEL)
    return _domain(session, f"calls with {codec}", number, codec)


def _domain(session: Session, label: str, number: int, codec: str) -> Domain:
    known = session.domains.get(number)
    return known or session.domain(DeclareDomain(label, number, tuple(range(session.me.size)), codec=codec))


def domain_of(session: Session, name: str | None, codec: str = "") -> Domain:
    """The domain of a call with this name and codec (empty: the job's)."""
    if name is None or codec == LOSSLESS:
        return exact_domain(session)
    return coded_domain(session, codec) if codec else calls_domain(session)


def read_codec(compression: object) -> str:
    """The codec spec of single tensors; empty for the job's. Raises TypeError, ValueError for one of whole matrices."""
    codec = "" if compression is None else arguments.read_codec(compression)
    if takes_matrices(codec):
        raise ValueError(f"compression={codec!r}: single tensors may be cut, and {codec} takes whole matrices")
    return codec
