"""The table of roles: complete, and each method where its effect puts it."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gcproto import admin_pb2 as pb
from gcserver.admin.roles import METHODS, OPERATOR, ROLES, VIEWER, suffices

#: everything that `service.py` registers
FILES: list[Any] = [pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]


def test_every_method_has_a_role() -> None:
    """A new rpc is refused to everybody until somebody says here who may call it."""
    offered = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert set(METHODS) == offered
    assert set(METHODS.values()) <= set(ROLES)


def test_what_changes_something_needs_an_operator() -> None:
    """By name: whoever adds a method that sets something and calls it viewing has to change this as well."""
    looking = ("Get", "List", "Check", "Watch", "ServerReflectionInfo", "Advise")
    for method, role in METHODS.items():
        name = method.rpartition("/")[2]
        assert role == (VIEWER if name.startswith(looking) else OPERATOR), method


@pytest.mark.parametrize(
    ("held", "needed", "enough"),
    [
        (None, VIEWER, False), (None, OPERATOR, False), (VIEWER, VIEWER, True), (VIEWER, OPERATOR, False),
        (OPERATOR, VIEWER, True), (OPERATOR, OPERATOR, True),
    ],
)  # fmt: skip
def test_an_operator_may_do_what_a_viewer_may(held: Any, needed: Any, enough: bool) -> None:
    assert suffices(held, needed) is enough
