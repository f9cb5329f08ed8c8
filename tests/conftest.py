"""How the tests are spread over processes.

What may live here: that. What may not: fixtures, which belong beside the tests that use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

#: Tests that start daemons wait for processes: one process runs them all, one after the other, beside the others.
_DAEMONS = {"integration", "system", "soak"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if _DAEMONS & set(item.path.relative_to(here).parts) or "real_run" in item.name:
            item.add_marker(pytest.mark.xdist_group("daemons"))
    # The longest group first, so that it does not begin when everything else is over.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
