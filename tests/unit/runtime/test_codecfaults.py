"""Which failures end a job and are its codec's, and what is said of them.

What may live here: tests of `gcserver/runtime/codecfaults.py`. What may not: what a lane does about such a failure
(`test_endings.py`), real daemons (`tests/integration/test_broken_codec.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gcserver.core import effects as fx
from gcserver.core.events import CodecChoice
from gcserver.runtime.codecfaults import codec_fault
from gcserver.runtime.statefiles import MemoryShort

ONE, OTHER = (b"j" * 16, 16), (b"k" * 16, 16)
MINE = CodecChoice("acme(ratio=0.1)", 40000, 100_000, True, False)
NONE = CodecChoice("none", 0, 0, False, False)
SPACE = SimpleNamespace(
    sections=[SimpleNamespace(tensors=[SimpleNamespace(name="b"), SimpleNamespace(name="w")])],
    blocks=[(SimpleNamespace(key=0, tensor=0), SimpleNamespace(key=4096, tensor=1))],
)
DOMAINS: Any = {d: SimpleNamespace(space=SPACE) for d in (ONE, OTHER)}


def encode(domain: tuple[bytes, int] = ONE, codec: CodecChoice = MINE) -> fx.Encode:
    return fx.Encode(domain, 4096, 7, codec, 0, 0, 1, None, 0, 0)


def decode(codec: int = 40000, key: int = 4096) -> fx.Decode:
    return fx.Decode(ONE, key, 7, None, codec, 100_000, 2, 0, False)


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (encode(), "codec acme(ratio=0.1) failed encoding block 4096 (w): ZeroDivisionError: by zero"),
        (decode(), "codec 40000, level 100000 failed decoding block 4096 (w): ZeroDivisionError: by zero"),
        (decode(key=9), "codec 40000, level 100000 failed decoding block 9: ZeroDivisionError: by zero"),
    ],
)
def test_a_fault_names_codec_block_and_exception(effect: Any, said: str) -> None:
    fault = codec_fault(effect, ZeroDivisionError("by zero"), DOMAINS)
    assert fault is not None
    assert (fault.domain, fault.kind, fault.step, fault.message) == (ONE, "CodecError", 7, said)
    assert "the daemon's log" in fault.advice


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (encode(codec=NONE), KeyError("x")),
        (decode(codec=0), KeyError("x")),
        (fx.Release(3), KeyError("x")),
        (encode(), MemoryShort(28, "no space")),
        (encode((b"z" * 16, 1)), KeyError("x")),
    ],
)
def test_what_is_not_a_codecs_doing_is_a_defect(effect: Any, error: Exception) -> None:
    assert codec_fault(effect, error, DOMAINS) is None
