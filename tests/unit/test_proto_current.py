"""The checked-in code of admin.proto is what admin.proto generates, and can be imported as gcproto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools", reason="grpcio-tools (the dev extra) generates the code to compare with")

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_current() -> None:
    command = [sys.executable, "-m", "tools.gen_proto", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_service_is_complete() -> None:
    from gcproto import admin_pb2

    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    assert service.full_name == "gradcomm.admin.v1.AdminService"
    assert [method.name for method in service.methods] == [
        "GetStatus",
        "ListPeers",
        "ListJobs",
        "ListTensors",
        "SetCodec",
        "GetPlan",
        "SetPlan",
        "Replan",
        "SetController",
        "GetProfile",
        "Advise",
        "StartTrace",
        "StopTrace",
        "GetTrace",
        "GetLogs",
        "Drain",
    ]
    for method in service.methods:
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"


def test_grpc_code_offers_every_method() -> None:
    from gcproto import admin_pb2, admin_pb2_grpc

    for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods:
        assert hasattr(admin_pb2_grpc.AdminServiceServicer, method.name)


def test_the_daemon_answers_every_method_itself() -> None:
    from gcproto import admin_pb2_grpc
    from gcserver.admin.service import Admin

    base = admin_pb2_grpc.AdminServiceServicer
    left = [name for name in vars(base) if not name.startswith("_") and getattr(Admin, name) is getattr(base, name)]
    assert not left
