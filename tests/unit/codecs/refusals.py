"""Payloads that no codec may take: what every family's tests assert of them."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import CodecError


def assert_refused(codec, payload, rule, n=10):
    """``payload`` is refused with a message that matches ``rule`` before anything is written."""
    out = np.full(n, 7.0, np.float32)
    for act in (codec.decode, codec.decode_add):
        with pytest.raises(CodecError, match=rule):
            act(np.frombuffer(payload, np.uint8), out)
    with pytest.raises(CodecError, match=rule):
        codec.check(payload, n)
    assert (out == 7).all()
