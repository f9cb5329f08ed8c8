"""Valid inputs gone wrong.

What may live here: changes of bytes, of trees (what msgpack, JSON and TOML decode to) and of frame headers, drawn from
a generator that is given. What may not: what an input is for.

Whoever is hostile knows the formats: trees are changed as trees and encoded again, headers keep their digests.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any, Final

import msgspec

from gcproto import wire
from gcproto.records import replace
from gcproto.wire import FrameType, Header, Phase

#: numbers at which something changes: signs, widths, bounds
EDGES: Final = (
    0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 32767, 65535, 65536, 10**6, 2**24 - 1,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
NEGATIVE: Final = (-1, -2, -(2**31), -(2**63))
FLOATS: Final = (0.0, -0.0, -1.0, 0.5, 1e-308, 1e308, float("inf"), float("-inf"), float("nan"))
WORDS: Final = (
    "", "*", "[", "[!", "**a" * 9, "none", "fp16", "topk(ratio=0.01)", "onebit", "powersgd(rank=2)", "all", "owner",
    "fail", "shrink", "auto", "static", "a", "b", "\0", "\n", "..", "../../x", "/etc/passwd", "%s%n", "é" * 5,
    "\U0010ffff",
    "x" * 300, "x" * 5000, "tcp://127.0.0.1:1", "tcp://a:99999", "inproc://x", "ipc:///tmp/x", "-1", "1e400", "nan",
)  # fmt: skip
DEEP: Final = 3000
_FIELDS: Final = {"phase": 8, "dtype": 8, "flags": 8, "codec": 16, "level": 16, "domain": 32, "epoch": 32, "step": 64,
                  "key": 64, "plan": 32, "proposal": 32, "incarnation": 64, "to_incarnation": 64, "link_seq": 64,
                  "ack": 64, "credit": 64, "elements": 64, "payload_bytes": 64, "aux": 64}  # fmt: skip


def number(rng: random.Random, near: int = 0) -> int:
    """An edge, a neighbour of ``near``, or any number of up to 64 bits."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(EDGES) + rng.choice((-1, 0, 0, 1))
    if kind == 1:
        return near + rng.choice((-2, -1, 1, 2, 8, 64))
    if kind == 2:
        return rng.choice(NEGATIVE)
    return rng.getrandbits(rng.choice((4, 8, 16, 32, 64)))


def spoil(rng: random.Random, valid: bytes, other: bytes = b"") -> bytes:
    """Bytes with one to four of their bytes, bits, words, lengths or ranges changed; ``other`` is there to splice."""
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(10)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        elif kind == 4:
            del data[at : at + rng.choice((1, 4, 8, 64))]
        elif kind == 5:
            width = rng.choice((1, 2, 4, 8))
            value = number(rng) & (1 << 8 * width) - 1
            data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 6:
            word = at & ~3
            near = int.from_bytes(data[word : word + 4], "little") + rng.choice((-1, 1))
            data[word : word + 4] = (near % 2**32).to_bytes(4, "little")
        elif kind == 7:
            source = rng.randrange(len(data) + 1)
            data[at : at + 4] = data[source : source + 4]
        elif kind == 8:
            data[at:at] = data[at : at + rng.choice((1, 16, 256))] * rng.choice((1, 2, 30))
        elif other:
            cut = rng.randrange(len(other))
            data[at:] = other[cut:]
    return bytes(data)


class Nest:
    """Lists or tables within one another, ``depth`` of them: a leaf here, since walking it would need as many calls.

    Of a kind that msgspec does not know how to write, so that no encoder takes it for a table.
    """

    def __init__(self, depth: int, tables: bool) -> None:
        self.depth, self.tables = depth, tables

    def text(self) -> str:
        """As JSON; as TOML too if they are lists."""
        return '{"a":' * self.depth + "1" + "}" * self.depth if self.tables else "[" * self.depth + "]" * self.depth

    def packed(self) -> bytes:
        """As msgpack."""
        return b"\x81\xa1a" * self.depth + b"\x01" if self.tables else b"\x91" * self.depth + b"\x01"


def _other(rng: random.Random, value: Any) -> Any:
    """Something else where ``value`` was: mostly of its type."""
    kind = type(value) if rng.random() < 0.8 else rng.choice((int, str, float, bytes, list, dict, bool, type(None)))
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return number(rng, value if isinstance(value, int) else 0)
    if kind is float:
        return rng.choice(FLOATS) if rng.random() < 0.6 else rng.uniform(-1e3, 1e3)
    if kind is str:
        text = value if isinstance(value, str) else ""
        drawn = rng.randrange(3)
        if drawn == 0:
            return rng.choice(WORDS)
        if drawn == 1:
            return spoil(rng, text.encode()).decode("utf-8", "replace")
        return text + rng.choice(WORDS)
    if kind is bytes:
        return spoil(rng, value if isinstance(value, bytes) else b"x" * 16)
    if kind is list:
        return [rng.choice(EDGES)] * rng.choice((0, 1, 3, 200))
    if kind is dict:
        return {rng.choice(WORDS): number(rng)}
    return None


def _size(tree: Any) -> int:
    """Nodes of a tree."""
    if isinstance(tree, dict):
        return 1 + sum(map(_size, tree.values()))
    if isinstance(tree, list | tuple):
        return 1 + sum(map(_size, tree))
    return 1


def _path(tree: Any, index: int) -> tuple[Any, ...]:
    """Where a tree's node of this index is, counted from the root, each before what is in it."""
    at: list[Any] = []
    while index:
        index -= 1
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            size = _size(value)
            if index < size:
                at.append(key)
                tree = value
                break
            index -= size
    return tuple(at)


def _changed(rng: random.Random, node: Any) -> Any:
    """A node as another one."""
    kind = rng.randrange(8)
    if kind == 0:
        return Nest(rng.choice((3, 50, DEEP)), rng.random() < 0.5)
    if isinstance(node, dict) and node and kind < 7:
        key = rng.choice(list(node))
        if kind < 3:
            return {k: v for k, v in node.items() if k != key}
        if kind < 5:
            return {**node, rng.choice(WORDS): rng.choice((1, [], {}, None, "x"))}
        return {**node, key: _other(rng, node[key])}
    if isinstance(node, list | tuple) and node and kind < 7:
        items, i = list(node), rng.randrange(len(node))
        if kind < 3:
            del items[i]
        elif kind < 5:
            items[i:i] = [items[i]] * rng.choice((1, 2, 300))
        elif kind == 5:
            rng.shuffle(items)
        else:
            items[i] = _other(rng, items[i])
        return items
    return _other(rng, node)


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(tree, dict):
        return {k: _put(v, path[1:], value) if k == path[0] else v for k, v in tree.items()}
    return [_put(v, path[1:], value) if i == path[0] else v for i, v in enumerate(tree)]


def grow(rng: random.Random, tree: Any) -> Any:
    """A tree with one to three of its nodes changed, removed, repeated, or of another type."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = _path(tree, rng.choice(range(min(_size(tree), 1 << 12))))
        node = tree
        for step in path:
            node = node[step]
        tree = _put(tree, path, _changed(rng, node))
    return tree


def packed(rng: random.Random, valid: bytes) -> bytes:
    """A msgpack message as another one: mostly a changed tree, sometimes changed bytes."""
    if rng.random() < 0.15:
        return spoil(rng, valid)
    try:
        tree = msgspec.msgpack.decode(valid)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return spoil(rng, valid)
    return pack(grow(rng, tree))


def pack(tree: Any) -> bytes:
    """msgpack of any tree; its integers are wrapped to 64 bits, which is all that the format has."""
    return msgspec.msgpack.encode(_wrapped(tree))


def _wrapped(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _wrapped(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_wrapped(v) for v in node]
    if isinstance(node, Nest):
        return msgspec.Raw(node.packed())
    if isinstance(node, int) and not isinstance(node, bool) and not -(2**63) <= node < 2**64:
        return node % 2**64
    return node


def json(tree: Any) -> bytes:
    """JSON of any tree, numbers as they are."""
    with contextlib.suppress(TypeError, OverflowError, UnicodeEncodeError):
        return msgspec.json.encode(tree)
    if isinstance(tree, dict):
        return b"{" + b",".join(msgspec.json.encode(str(k)) + b":" + json(v) for k, v in tree.items()) + b"}"
    if isinstance(tree, list | tuple):
        return b"[" + b",".join(map(json, tree)) + b"]"
    if isinstance(tree, Nest):
        return tree.text().encode()
    return str(tree).encode() if isinstance(tree, int) and not isinstance(tree, bool) else msgspec.json.encode(tree)


def header(rng: random.Random, h: Header) -> Header:
    """A header with one to three fields changed; its digest is made anew when it is packed."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice((*_FIELDS, "type", "job", "sender"))
        if name == "type":
            h = replace(h, type=rng.choice(list(FrameType)))
        elif name == "phase":
            h = replace(h, phase=rng.choice(list(Phase)))
        elif name == "job":
            h = replace(h, job=rng.choice((h.job, bytes(16), rng.randbytes(16))))
        elif name == "sender":
            h = replace(h, sender=rng.choice((h.sender, 1, rng.getrandbits(64) or 1)))
        else:
            h = replace(h, **{name: number(rng, getattr(h, name)) & (1 << _FIELDS[name]) - 1})
    return h


def sealed(h: Header, payload: bytes, rng: random.Random | None = None) -> tuple[bytes, bytes]:
    """Header bytes and payload with true lengths and digests; with ``rng`` the length is sometimes left as it is."""
    if rng is None or rng.random() < 0.9:
        h = replace(h, payload_bytes=len(payload), payload_digest=wire.digest(payload))
    return wire.pack(h), payload
