"""buf, the tool of the field for Protobuf, which is a foreign gRPC client too.

What may live here: having it. What may not: how things are installed (`installed.py`), what it is asked to do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import installed


@pytest.fixture(scope="module")
def buf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The buf executable, installed into a folder of its own."""
    return installed.from_npm(tmp_path_factory.mktemp("buf"), "@bufbuild/buf") / "buf"
