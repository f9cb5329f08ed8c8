"""`gcserver health` against a real server: who answers, who drains, and who cannot be asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gcserver import cli
from gcserver.admin.service import serve
from gcserver.admin.source import NodeState
from gcserver.health import reached_at
from tests.unit.admin.source import NODE, FixedSource


class Draining(FixedSource):
    def node(self):  # type: ignore[no-untyped-def]
        return replace(NODE, state=NodeState.DRAINING)


def probed(source: FixedSource, address: str, *more: str) -> int:
    """The exit status of a probe beside a server."""

    async def beside() -> int:
        server = await serve(source, address)
        try:
            return await asyncio.to_thread(cli.main, ["health", f"--node.admin={server.address}", *more])
        finally:
            await server.stop()

    return asyncio.run(beside())


def test_a_daemon_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("127.0.0.1:0", f"unix:{tmp_path}/admin.sock"):
        assert probed(FixedSource(), address) == probed(FixedSource(), address, "--live") == 0
    assert capsys.readouterr().out == "serving\n" * 4


def test_a_daemon_that_drains_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probed(Draining(), "127.0.0.1:0") == 1
    assert probed(Draining(), "127.0.0.1:0", "--live") == 0
    assert capsys.readouterr().out == "draining\n" * 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node.admin=unix:{folder}/nobody.sock"], "no daemon answers at unix:{folder}/nobody.sock"),
        (["--node.admin="], "node.admin is off"),
        (
            ["--node.admin=127.0.0.1:1", *(f"--admin.{name}={{folder}}/x" for name in ("ca", "cert", "key"))],
            "127.0.0.1:1 wants an operator's certificate",
        ),
    ],
)
def test_who_cannot_be_asked(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["health", *(flag.format(folder=tmp_path) for flag in flags)]) == 1
    assert said.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("admin", "reached"),
    [
        ("0.0.0.0:7460", "127.0.0.1:7460"),
        ("[::]:7460", "[::1]:7460"),
        ("10.0.0.0:7460", "10.0.0.0:7460"),
        ("[fd00::]:7460", "[fd00::]:7460"),
        ("unix:/run/0.0.0.0:1/admin.sock", "unix:/run/0.0.0.0:1/admin.sock"),
    ],
)
def test_where_a_daemon_is_reached(admin: str, reached: str) -> None:
    assert reached_at(admin) == reached
