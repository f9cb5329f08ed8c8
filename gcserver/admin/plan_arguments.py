"""What an operator writes about plans: rules ``PATTERN=SPEC[@SCHEME]`` or a JSON list of them, parameters, rates.

What may live here: from text to messages and numbers. What may not: what a rule means and whether it can be
run (the daemon says).
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from gcproto import admin_pb2 as pb
from gcproto.rates import read_rate
from gcserver.admin.source import MAX_REQUEST

RULE = "PATTERN=SPEC[@SCHEME]"
#: bytes of a file of rules; a slip may name anything
_MOST = 16 << 20
#: of a request that are left for what a command says besides
_ROOM = 64 << 10
_KEYS = ("pattern", "codec", "scheme")


def rule(text: str) -> pb.PlanRule:
    """One rule. Raises argparse.ArgumentTypeError.

    The pattern ends at the first ``=`` (specs have their own), the scheme begins after the last ``@``.
    """
    pattern, equals, rest = (part.strip() for part in text.partition("="))
    if not (pattern and equals and rest):
        raise argparse.ArgumentTypeError(f"expected {RULE} such as 'layer.*=topk(ratio=0.01)@all', got {text!r}")
    codec, at, scheme = (part.strip() for part in rest.rpartition("@"))
    if not at:
        return _made(text, pattern=pattern, codec=rest)
    if not (codec and scheme):
        raise argparse.ArgumentTypeError(f"expected a codec before and a scheme after '@', got {text!r}")
    return _made(text, pattern=pattern, codec=codec, scheme=scheme)


def _made(text: str, **parts: str) -> pb.PlanRule:
    try:
        return pb.PlanRule(**parts)
    except UnicodeEncodeError:  # half of a character
        raise argparse.ArgumentTypeError(f"expected UTF-8, got {text!r}") from None


def rules_in_file(path: str) -> list[pb.PlanRule]:
    """The rules in a JSON file: a list of ``{"pattern": ..., "codec": ..., "scheme": ...}``, the last key optional.

    Raises argparse.ArgumentTypeError, whose text names the file and the rule.
    """
    try:
        with open(path, "rb") as file:
            held = file.read(_MOST + 1)
        if len(held) > _MOST:
            raise ValueError(f"more than {_MOST} bytes")
        content = json.loads(held)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(content, list):
        raise argparse.ArgumentTypeError(f"{path}: expected a list of rules, got {type(content).__name__}")
    found = [_from_json(f"{path}: rule {i}", item) for i, item in enumerate(content)]
    if (nbytes := pb.SetPlanRequest(rules=found).ByteSize()) > MAX_REQUEST - _ROOM:
        text = f"expected rules of {(MAX_REQUEST - _ROOM) >> 10} KiB at most, as a request has, got {nbytes >> 10} KiB"
        raise argparse.ArgumentTypeError(f"{path}: {text}; put one pattern in place of many names")
    return found


def _from_json(where: str, item: Any) -> pb.PlanRule:
    whole = isinstance(item, dict) and {"pattern", "codec"} <= set(item) <= set(_KEYS)
    if not whole or not all(isinstance(value, str) for value in item.values()):
        wanted = "strings pattern and codec, and perhaps scheme"
        raise argparse.ArgumentTypeError(f"{where}: expected an object of {wanted}; got {json.dumps(item)}")
    return _made(f"{where}: {json.dumps(item)}", **item)


def parameter(text: str) -> tuple[str, float]:
    """``NAME=VALUE`` of a controller. Raises argparse.ArgumentTypeError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    try:
        if name and equals and math.isfinite(number := float(value)):
            return name, number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected NAME=VALUE such as k_min=0.001, got {text!r}")


def bandwidth(text: str) -> float:
    """``100mbit`` as bytes a second. Raises argparse.ArgumentTypeError."""
    try:
        return read_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
