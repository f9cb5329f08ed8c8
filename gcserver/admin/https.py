"""TLS for a server of asyncio whose certificates may change while it runs.

What may live here: the context such a server is given, and whose certificate a connection has. What may not: HTTP
(`exposition.py`), reading files (`certificates.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from gcserver.admin.certificates import Certificates, Identity, shown


def renewed(certificates: Certificates, refused: Callable[[], None]) -> ssl.SSLContext:
    """A context that makes every connection with the newest certificates. ``refused`` is called, in the loop, for each
    handshake that fails."""

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                refused()
                raise

    class Renewed(ssl.SSLContext):
        def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
            newest = certificates.current().tls
            newest.sslobject_class = Counted
            return newest.wrap_bio(*args, **kwargs)

    return Renewed(ssl.PROTOCOL_TLS_SERVER)


def identity_of(connection: ssl.SSLObject) -> Identity:
    """Whose certificate the client showed; without one, which the handshake does not allow, nobody's."""
    return shown(connection.getpeercert(binary_form=True) or b"")
