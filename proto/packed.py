"""Messages as bytes, and bytes as messages: msgpack, typed, validated while decoding, no pickle.

What may live here: that, and the base of all messages. What may not: the messages themselves (`messages.py`).
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES: Final = 64 << 20
#: what decoding raises for bytes of something else; the second for text that is none, the third for values nested too
#: deep, known or to be passed over
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
T = TypeVar("T")


class MessageError(ValueError):
    """Bytes that are not a message of the expected kind."""


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of all messages."""


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Decoder(Generic[T]):
    """Decodes one union of messages. Raises :class:`MessageError` on anything else."""

    def __init__(self, union: Any) -> None:
        self._decoder: Any = msgspec.msgpack.Decoder(union)

    def __call__(self, data: object) -> T:
        size = len(data)  # type: ignore[arg-type]
        if size > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {size}")
        try:
            message: T = self._decoder.decode(data)
        except UNREADABLE as error:
            raise MessageError(str(error)) from error
        return message
