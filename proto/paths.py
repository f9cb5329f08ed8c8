"""Where a worker and its daemon meet when nobody says otherwise.

What may live here: default paths that both sides must agree on. What may not: creating anything.
"""

from __future__ import annotations

import os
from pathlib import Path


def default_socket() -> Path:
    """``$XDG_RUNTIME_DIR/gradcomm/daemon.sock``, else ``/tmp/gradcomm-<uid>/daemon.sock``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "gradcomm" if runtime else Path(f"/tmp/gradcomm-{os.getuid()}")
    return base / "daemon.sock"
