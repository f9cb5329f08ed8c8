"""The arbiter in etcd, against a gateway that keeps keys as etcd does.

What may live here: tests of `gcserver/runtime/etcd.py` without etcd; with a real one: `tests/system/test_etcd.py`.
"""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gcproto.messages import EpochDecided, MemberInfo
from gcserver.core.control_events import ArbiterSilent, Arbitrate, EpochWon
from gcserver.runtime.etcd import EtcdArbiter, EtcdError


class Gateway(ThreadingHTTPServer):
    """One key: its value and how often it was written. ``garbage`` is answered instead, if there is any."""

    value = b""
    version = 0
    garbage = b""
    url = ""


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (compare,), (put,) = asked["compare"], asked["success"]
        assert self.path == "/v3/kv/txn" and (compare["target"], compare["result"]) == ("VERSION", "EQUAL")
        assert compare["key"] == put["requestPut"]["key"] == asked["failure"][0]["requestRange"]["key"]
        answer: dict[str, Any] = {}
        if compare["version"] == str(self.server.version):
            self.server.value = base64.b64decode(put["requestPut"]["value"])
            self.server.version += 1
            answer["succeeded"] = True
        else:
            answer["responses"] = [
                {"response_range": {"kvs": [{"value": base64.b64encode(self.server.value).decode()}]}}
            ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.garbage or json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def record(epoch: int, node: str) -> EpochDecided:
    return EpochDecided("train", b"j" * 16, epoch, 1, (MemberInfo(node, f"tcp://{node}:1", (0,)),), (1,))


def test_the_first_to_swap_wins_and_the_others_read_it(gateway: Gateway) -> None:
    a, b = EtcdArbiter((gateway.url,)), EtcdArbiter((gateway.url,))
    assert a.compare_and_swap(0, record(1, "a")) == record(1, "a")
    assert b.compare_and_swap(0, record(1, "b")) == record(1, "a")
    assert b.compare_and_swap(1, record(2, "b")) == record(2, "b")
    assert a.compare_and_swap(1, record(2, "a")) == record(2, "b")


def test_members_are_asked_in_turn(gateway: Gateway) -> None:
    arbiter = EtcdArbiter(("http://127.0.0.1:9", gateway.url), timeout=5.0)
    assert arbiter.compare_and_swap(0, record(1, "a")) == record(1, "a")


def test_no_proxy_is_asked(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # as in a process that has asked nobody yet
    assert EtcdArbiter((gateway.url,)).compare_and_swap(0, record(1, "a")) == record(1, "a")


def test_silence_names_every_member(gateway: Gateway) -> None:
    asked = Arbitrate(0, record(1, "a"))
    silent = EtcdArbiter(("http://127.0.0.1:9", "http://127.0.0.1:19"), timeout=1.0).answer(asked)
    assert isinstance(silent, ArbiterSilent) and silent.record == asked.record
    assert "127.0.0.1:9:" in silent.reason and "127.0.0.1:19:" in silent.reason
    assert EtcdArbiter((gateway.url,)).answer(asked) == EpochWon(asked.record)


@pytest.mark.parametrize(
    "garbage",
    [b"<html>", b"[]", b"{}", b'{"responses":[{"response_range":{"kvs":[{"value":"AA=="}]}}]}', b"[" * 100_000],
    ids=["html", "list", "nothing", "no record", "nested"],
)
def test_what_is_no_answer_is_an_error(gateway: Gateway, garbage: bytes) -> None:
    gateway.garbage = garbage
    with pytest.raises(EtcdError):
        EtcdArbiter((gateway.url,)).compare_and_swap(0, record(1, "a"))
