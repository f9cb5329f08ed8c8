"""The dashboard's files, and under which conditions a browser may use them.

What may live here: reading them from the package, the headers that confine a page, under which names it is served. What
may not: the page itself (`page/`), what it shows (`overview.py`, `details.py`).
"""

from __future__ import annotations

import ipaddress
from importlib.resources import files
from typing import Final

from gcserver.admin.http import Answer

#: The page itself; its parts are below this.
ROOT: Final = "/"
PARTS: Final = "/dashboard/"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: What the page may do: use its own files and its own events, and nothing else. No script or style stands in the page,
#: nothing is made of text (Trusted Types), nobody may put it into a frame.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
CONFINED: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


def load() -> dict[str, Answer]:
    """Every file of `page/` by the path under which it is served."""
    found = {}
    for file in files("gcserver.admin").joinpath("page").iterdir():
        kind = _KINDS.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            path = ROOT if file.name == "index.html" else PARTS + file.name
            found[path] = Answer(200, kind, file.read_bytes(), CONFINED)
    return found


def is_own(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header names this machine in a way that nobody else's page can: an address, a name without a dot,
    or one of ``names``.

    A page of a stranger whose name leads to this address for a moment (DNS rebinding) would otherwise read the
    dashboard through the browser of somebody who may.
    """
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(".localhost") or name in names)
    return True
