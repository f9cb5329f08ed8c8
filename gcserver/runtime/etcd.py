"""The arbiter of jobs that outlive their nodes: etcd, asked over its JSON gateway.

What may live here: one transaction, which member of the cluster is asked, how long. What may not: what an epoch means
(`gcserver.core.epochs`), the supervisor's loop: these calls block, and are made in a thread of their own.

etcd counts how often a key was written since it was made: its *version*. A job has one key, written once an epoch, so
that "if its version is the number of the epoch before" is the whole compare-and-swap. The gateway speaks HTTP and JSON,
with keys and values in base64, which needs nothing that is not in Python; Debian's etcd-server has it (3.4 and later).
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

import msgspec

from gcproto.messages import EpochDecided
from gcproto.packed import UNREADABLE
from gcserver.core.control_events import ArbiterSilent, Arbitrate, EpochWon

PREFIX: Final = "gradcomm/jobs/"
#: A member of etcd that does not answer within this is passed over, seconds.
TIMEOUT: Final = 3.0
#: An answer holds one record; nothing longer is read, bytes.
MAX_ANSWER: Final = 16 << 20


class EtcdError(Exception):
    """No member of etcd gave an answer that can be used. The text says which, and why."""


class EtcdArbiter:
    """Compare-and-swap over a job's epochs in etcd. ``endpoints``: URLs of its members, asked in turn."""

    def __init__(self, endpoints: tuple[str, ...], timeout: float = TIMEOUT) -> None:
        self.endpoints = endpoints
        self._timeout = timeout
        # A proxy named in the environment is for the web, not for members of the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(self, asked: Arbitrate) -> EpochWon | ArbiterSilent:
        """What a control machine hears of its question."""
        try:
            return EpochWon(self.compare_and_swap(asked.expected, asked.record))
        except EtcdError as error:
            return ArbiterSilent(asked.record, str(error))

    def compare_and_swap(self, expected: int, record: EpochDecided) -> EpochDecided:
        """If the job's newest epoch is ``expected``, make ``record`` the next. Returns the newest record.

        Raises :class:`EtcdError`; the swap may have been made nevertheless, and asking again tells.
        """
        key = _base64(f"{PREFIX}{record.job.hex()}".encode())
        answer = self._ask(
            {
                "compare": [{"key": key, "target": "VERSION", "result": "EQUAL", "version": str(expected)}],
                "success": [{"requestPut": {"key": key, "value": _base64(msgspec.msgpack.encode(record))}}],
                "failure": [{"requestRange": {"key": key}}],
            }
        )
        if answer.get("succeeded"):
            return record
        try:
            (found,) = answer["responses"][0]["response_range"]["kvs"]
            return msgspec.msgpack.decode(base64.b64decode(found["value"]), type=EpochDecided)
        except (LookupError, TypeError, ValueError, *UNREADABLE) as error:
            raise EtcdError(f"etcd has no usable record of job {record.label!r} under {PREFIX}: {error!r}") from None

    def _ask(self, transaction: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(transaction).encode()
        failed = []
        for endpoint in self.endpoints:
            try:
                request = urllib.request.Request(
                    f"{endpoint}/v3/kv/txn", body, {"Content-Type": "application/json"}, method="POST"
                )
                with self._opener.open(request, timeout=self._timeout) as response:
                    answer = json.loads(response.read(MAX_ANSWER))
                if isinstance(answer, dict):
                    return answer
                failed.append(f"{endpoint}: not the answer of an etcd")
            except (OSError, ValueError, RecursionError, HTTPException) as error:
                failed.append(f"{endpoint}: {getattr(error, 'reason', None) or error}")
        raise EtcdError("; ".join(failed) or "cluster.etcd names no endpoint")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
