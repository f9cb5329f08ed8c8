"""`python -m gcclient.run -- COMMAND`: the command `gcrun` where scripts of the installation are not on the path.

What may live here: becoming `gcserver.gcrun`. What may not: anything else; this process has loaded torch, which whoever
looks after a job has no use for.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Become `gcrun` with the same arguments; does not return."""
    os.execv(sys.executable, [sys.executable, "-m", "gcserver.gcrun", *sys.argv[1:]])


if __name__ == "__main__":
    main()
