"""How the tests are spread over processes.

What may live here: that. What may not: fixtures, which belong beside the tests that use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

#: Tests that start daemons: those of a file share some, so that one process has to run them all.
_DAEMONS = {"integration", "system", "soak"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if _DAEMONS & set(item.path.relative_to(here).parts) or "real_run" in item.name:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    # The longest groups first, so that none begins when everything else is over.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
