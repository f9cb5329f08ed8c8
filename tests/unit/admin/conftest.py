"""What holds for all tests of the operator's side.

What may live here: that. What may not: fixtures that a test asks for, which belong beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver.admin.contexts import VARIABLE
from gcserver.admin.gcctl_settings import ADDRESS_VARIABLE, CONTEXT_VARIABLE, TLS


@pytest.fixture(autouse=True)
def _nobodys_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever runs the tests may have contexts and variables of their own."""
    for variable in (VARIABLE, CONTEXT_VARIABLE, ADDRESS_VARIABLE, *(variable for _, variable, *_ in TLS)):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path(tmp_path_factory.getbasetemp()) / "no-config"))
