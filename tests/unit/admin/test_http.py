"""Heads of requests read, answers written."""

from __future__ import annotations

import pytest

from gcserver.admin import http


def test_a_request() -> None:
    found = http.parse(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a:1\r\nACCEPT:  text/plain \r\nhost: b\r\nnonsense\r\n\r\n")
    assert (found.method, found.path) == ("GET", "/metrics")
    assert found.headers == {"host": "a:1", "accept": "text/plain"}, "the first counts"


@pytest.mark.parametrize(
    ("head", "status"), [(b"GET /\r\n\r\n", 400), (b"GET / SPDY/3\r\n\r\n", 400), (b"POST / HTTP/1.1\r\n\r\n", 405)]
)
def test_what_is_no_request_of_ours(head: bytes, status: int) -> None:
    with pytest.raises(http.Refused) as caught:
        http.parse(head)
    assert caught.value.answer.status == status
    assert (("Allow", "GET, HEAD") in caught.value.answer.headers) == (status == 405)


def test_an_answer() -> None:
    answer = http.text(503, "later", ("Retry-After", "5"))
    head, _, body = http.message(answer).partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 503 Service Unavailable", b"Content-Type: text/plain; charset=utf-8", b"Retry-After: 5",
        b"Content-Length: 6", b"Connection: close",
    ]  # fmt: skip
    assert body == b"later\n"
    assert http.message(answer, with_body=False) == head + b"\r\n\r\n"
