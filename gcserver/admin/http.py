"""Just enough HTTP/1.1 to answer a GET: a request's head read, an answer written.

What may live here: bytes on one side, values on the other. What may not: sockets (`exposition.py`), what is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` is without what follows a question mark; ``headers`` by their names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """``kind`` is the Content-Type; ``headers`` come beside it and the length."""

    status: int
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def text(status: int, said: str, *headers: tuple[str, str]) -> Answer:
    """A line for a person."""
    return Answer(status, TEXT, f"{said}\n".encode(), headers)


class Refused(Exception):
    """A head that is no request we answer; ``answer`` says so."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body.decode())
        self.answer = answer


def parse(head: bytes) -> Request:
    """A request's line and headers. Raises Refused. Of a header that comes twice the first counts."""
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Refused(text(400, "expected an HTTP/1.1 request"))
    method, target, _ = parts
    if method not in ("GET", "HEAD"):
        raise Refused(text(405, "only GET and HEAD", ("Allow", "GET, HEAD")))
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.lower(), value.strip())
    return Request(method, target.partition("?")[0], headers)


def message(answer: Answer, with_body: bool = True) -> bytes:
    """An answer after which the connection is closed; the answer to HEAD is without its body."""
    return head(answer.status, answer.kind, *answer.headers, ("Content-Length", str(len(answer.body)))) + (
        answer.body if with_body else b""
    )


def head(status: int, kind: str, *headers: tuple[str, str]) -> bytes:
    """What comes before a body."""
    fields = (("Content-Type", kind), *headers, ("Connection", "close"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{lines}\r\n".encode("latin-1")
