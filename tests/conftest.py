"""How the tests are spread over processes, and what their processes inherit.

What may live here: that. What may not: fixtures, which belong beside the tests that use them.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# Their assertions show values as those of tests do.
pytest.register_assert_rewrite("tests.integration.ddp_checks", "tests.unit.runtime.transport_promises")

#: Tests that start daemons take longest. `--dist loadfile` gives a file to one process, so that what its tests share is
#: started once (groups by mark would need an xdist that knows pytest 9.2).
_DAEMONS = {"integration", "system", "soak"}
#: Files of `tests/system` that take longest, the longest first. A process is given its next file when two tests of the
#: one before are left, and files with fewer tests thus come in pairs.
_LONG = ("test_demo", "test_losses", "test_elastic", "test_systemd", "test_rejoin", "test_slurm", "test_resources")

# What a shell starts with `&`, or a service that runs jobs, may ignore Ctrl-C, and so would all that tests press it at.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _place(item: pytest.Item) -> tuple[bool, int]:
    folder, *_ = item.path.relative_to(Path(__file__).parent).parts
    if item.get_closest_marker("system") and folder != "system":
        raise pytest.UsageError(f"{item.nodeid} is marked `system`, but is not in tests/system: nothing would run it")
    name = item.path.stem
    return folder not in _DAEMONS, _LONG.index(name) if folder == "system" and name in _LONG else len(_LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long comes first, so that none of it begins when everything else is over.
    items.sort(key=_place)
