"""How the tests are spread over processes.

What may live here: that. What may not: fixtures, which belong beside the tests that use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

#: Tests that start daemons take longest. `--dist loadfile` gives a file to one process, so that what its tests share is
#: started once (groups by mark would need an xdist that knows pytest 9.2).
_DAEMONS = {"integration", "system", "soak"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    # They come first, so that none begins when everything else is over.
    items.sort(key=lambda item: not _DAEMONS & set(item.path.relative_to(here).parts))
