"""The commands as scripts of an installation: with all it needs, and where only the client was installed.

What may live here: tests of `gcserver/scripts.py`. What may not: what commands do.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gcserver import __version__, scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
#: what the extra `server` brings
EXTRA = ("zmq", "numba", "grpc", "google", "prometheus_client", "cryptography", "cffi", "argcomplete")


def script(name: str, *arguments: str, without: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Status and outputs of a script as pip writes it, where some packages cannot be imported."""
    module, _, function = SCRIPTS[name].partition(":")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({without}); from {module} import {function} as main;"
        f"sys.argv[1:] = {arguments}; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["gcserver", "gcctl"])
def test_with_all_they_need(name: str) -> None:
    argument = "version" if name == "gcserver" else "--version"
    status, out, err = script(name, argument)
    assert (status, err) == (0, "") and __version__ in out


@pytest.mark.parametrize(
    ("name", "argument"), [("gcserver", "run"), ("gcserver", "warmup"), ("gcctl", "status"), ("gcctl", "--help")]
)
def test_in_an_environment_with_the_client_alone(name: str, argument: str) -> None:
    status, out, err = script(name, argument, without=EXTRA)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert f"{name}: " in err and "is missing: " in err and "pip install 'gradcomm[server]'" in err


def test_a_module_of_ours_that_is_not_there_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcserver.admin.exits", None)
    for module in ("gcserver.admin.gcctl", "gcserver.admin.contexts"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match="exits"):
        scripts.gcctl()
