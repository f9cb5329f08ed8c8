"""Target: a daemon's configuration, as a file, as flags and as variables, and the texts that it shares with `gcctl`.

The first byte of an input says what the rest is. Only ConfigError and ValueError (of a single value) may come of it;
what is accepted is written down again and read as the same.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from gcserver import config, values
from gcserver.config import ConfigError, describe, load, to_toml, value_of
from gcserver.config_keys import KEYS
from tests.fuzz import mutate

FILE: Final = """
insecure = true
partition_bytes = "8MiB"
[node]
name = "a"
listen = "tcp://0.0.0.0:7470"
advertise = "tcp://10.0.0.1:7470"
lanes = 2
cores = [0, 1]
metrics = "127.0.0.1:9100"
admin = "127.0.0.1:7400"
[cluster]
peers = ["a=tcp://10.0.0.1:7470", "b=tcp://[::1]:7470"]
lease = "10s"
[job]
deadline = "30min"
on_loss = "fail"
[codec]
default = "topk(ratio=0.01)"
[plan]
mode = "auto"
exclude = ["*.bias", "embed[0-9]"]
controller = "dc2-da2(k_min=0.01,k_max=0.2)"
[log]
level = "info"
"""
_TREE: Final = msgspec.toml.decode(FILE.encode())
_NAMES: Final = [key.name for key in KEYS]
READERS: Final[dict[str, Callable[[Any], object]]] = {
    "size": values.read_size,
    "duration": values.read_duration,
    "bool": values.read_bool,
    "cores": values.read_cores,
    "endpoint": values.read_endpoint,
    "tcp": values.read_tcp,
    "list": lambda raw: values.read_list(raw, "names"),
    "int": lambda raw: values.read_int(raw, 0, 100),
}
_TEXTS: Final = (
    "64KiB", "1.5G", "30min", "1h", "2.5s", "0-3,6", "auto", "[0, 1]", "tcp://[::1]:7470", "*:80", "yes", "a=tcp://b:1",
    '["a", "b"]', "a,b",
)  # fmt: skip


class Configs:
    """Everything an operator writes."""

    name = "config"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradcomm-fuzz-", dir="/dev/shm")
        self._file = Path(self._folder.name) / "gradcomm.toml"
        self.feed(b"f" + FILE.encode())

    def close(self) -> None:
        self._folder.cleanup()

    # ----------------------------------------------------------------------------------------- inputs
    def draw(self, rng: random.Random) -> bytes:
        kind = rng.randrange(10)
        if kind < 3:
            return b"f" + mutate.spoil(rng, FILE.encode(), describe().encode())
        if kind < 6:
            return b"f" + toml(mutate.grow(rng, _TREE)).encode("utf-8", "replace")
        if kind < 9:
            some = {rng.choice(_NAMES): _text(rng) for _ in range(rng.randrange(1, 4))}
            if rng.random() < 0.1:
                some[_text(rng)] = _text(rng)
            return rng.choice((b"g", b"v")) + msgspec.json.encode(some)
        return b"r" + mutate.json([rng.choice(list(READERS)), mutate.grow(rng, rng.choice(_TEXTS))])

    # ---------------------------------------------------------------------------------------- feeding
    def feed(self, data: bytes) -> str:
        outcome = self._feed(data[:1], data[1:])
        assert load(None, {"node.name": "n"}, {"GC_LOG_LEVEL": "debug"}).log.level == "debug"
        return outcome

    def _feed(self, kind: bytes, data: bytes) -> str:
        try:
            if kind == b"f":
                self._file.write_bytes(data)
                return self._again(load(self._file))
            if kind == b"r":
                name, value = _decoded(data, tuple[str, Any])
                READERS.get(name, values.read_bool)(value)
                return "read"
            given = _decoded(data, dict[str, str])
            if kind == b"g":
                return self._again(load(None, given))
            names = {name: "GC_" + name.replace(".", "_").upper() for name in given}
            return self._again(load(None, None, {names[k]: v for k, v in given.items()}))
        except ConfigError:
            return "refused"
        except ValueError:
            # Of a reader alone; `load` names the key instead.
            if kind != b"r":
                raise
            return "refused"

    def _again(self, found: config.Config) -> str:
        self._file.write_text(to_toml(found))
        again = load(self._file)
        for key in KEYS:
            assert value_of(again, key.name) == value_of(found, key.name), key.name
        return "accepted"


def _decoded(data: bytes, type_: Any) -> Any:
    """What an input holds; one that cannot be taken apart is none of a reader's business."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ("bool", "") if type_ is not dict[str, str] else {}


def _text(rng: random.Random) -> str:
    text = rng.choice((*_TEXTS, *mutate.WORDS, "info", "dc2-da2(start=0.1)", "topk(ratio=0.5)", "1", "0.5"))
    if rng.random() < 0.5:
        return text
    return mutate.spoil(rng, text.encode(), rng.choice(_TEXTS).encode()).decode("utf-8", "replace")


def toml(tree: Any) -> str:
    """A tree as TOML with inline tables; what TOML has no words for is written so that it is none."""
    if not isinstance(tree, dict):
        return _inline(tree)
    return "".join(f"{_key(key)} = {_inline(value)}\n" for key, value in tree.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    if isinstance(value, bool | int | str):
        return values.toml_value(value)
    if isinstance(value, mutate.Nest):
        return value.text()
    return repr(value)


def _key(key: Any) -> str:
    text = str(key)
    return text if text and all((c.isalnum() and c.isascii()) or c in "-_" for c in text) else values.toml_value(text)
