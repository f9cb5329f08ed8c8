"""What UCX is told before it is loaded, unless somebody has told it otherwise.

What may live here: UCX's variables that a daemon sets. What may not: refusing what it was told (`ucxenviron.py`), the
library, which reads them (`ucp.py`).
"""

from __future__ import annotations

from collections.abc import MutableMapping


def tell(environ: MutableMapping[str, str]) -> None:
    """Set what is not set yet; of TCP only where ``UCX_TLS`` may use it, since UCX warns of what nothing reads."""
    # UCX would have SIGHUP switch its logging; to a daemon it means other things. The loader runs what reads this.
    environ.setdefault("UCX_DEBUG_SIGNO", "0")
    if {"tcp", "all"} & set(environ.get("UCX_TLS", "all").split(",")):
        # UCX 1.13 aborts with the one where a peer dies while large payloads go to it, without the other (which also
        # keeps a firewall from holding the loop for minutes) where it dies between connect() and what is said first.
        environ.setdefault("UCX_TCP_PUT_ENABLE", "n")
        environ.setdefault("UCX_TCP_CONN_NB", "y")
