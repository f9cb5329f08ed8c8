"""What users hand in, as the types that messages carry.

What may live here: readers of single arguments and of the variables that stand in for them. What may not: which
arguments there are, sockets, tensors' contents.

A message is typed: what the daemon cannot decode ends the connection. So whatever goes into one is read here before
anything is sent, and a wrong value is refused with the name of the argument it came from.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gcproto.agreed import MAX_EXCLUDE
from gcproto.durations import DURATION_FORM, read_duration
from gcproto.manifest import MAX_NAME, MAX_SECTION_ELEMENTS
from gcproto.messages import LAST_SEED


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker wants of its job; rank 0's counts. Where it is 0, empty or None the daemon decides.

    ``deadline`` in seconds; ``plan`` and ``quality`` are words of `gcproto.modes`; ``controller`` the daemon knows.
    """

    deadline: float = 0.0
    on_loss: str = ""
    seed: int | None = None
    plan: str = ""
    quality: str = ""
    controller: str = ""


_SHAPE_FORM: Final = "whole numbers from 0 on, or one tuple of them"


def read_whole(value: Any, source: str) -> int:
    """An int from anything that is one, such as numpy's, but no bool. Raises TypeError that names ``source``."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{source}={value!r}: expected a whole number, got a {type(value).__name__}")


def read_optional(value: Any, source: str) -> int | None:
    """:func:`read_whole` of an argument that may be left out."""
    return None if value is None else read_whole(value, source)


def read_text(value: object, source: str) -> str:
    """Text that UTF-8 can encode. Raises TypeError and ValueError that name ``source``."""
    if not isinstance(value, str):
        raise TypeError(f"{source}={value!r}: expected text, got a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source}={value!r}: expected text that UTF-8 can encode") from None
    return str.__str__(value)  # messages carry no subclass, such as numpy's


def read_codec(compression: object) -> str:
    """A codec's spec. Raises TypeError that names ``compression`` and says what would do, ValueError."""
    if not isinstance(compression, str):
        raise TypeError(
            f"compression={compression!r}: expected text, a codec's spec such as 'topk(ratio=0.01)' or "
            f"gcclient.Compression.fp16, got a {type(compression).__name__}"
        )
    return read_text(compression, "compression")


def read_setting(value: object, source: str, environ: Mapping[str, str], variable: str) -> str:
    """An argument, or the variable that stands in for it; empty without either. Raises TypeError and ValueError that
    name where the value came from."""
    given = "" if value is None else read_text(value, source)
    return given or read_text(environ.get(variable, ""), variable)


def read_word(value: object, source: str, environ: Mapping[str, str], variable: str, known: Sequence[str]) -> str:
    """:func:`read_setting` of one of the ``known`` words; ValueError that lists them for another."""
    text = read_setting(value, source, environ, variable)
    if text and text not in known:
        where = variable if value is None or value == "" else source
        raise ValueError(f"{where}={text}: expected one of {', '.join(known)}")
    return text


def read_name(name: object) -> str:
    """A tensor's name. Raises TypeError and ValueError."""
    text = read_text(name, "name")
    if len(text) > MAX_NAME:
        raise ValueError(f"name={text[:40]!r}...: a tensor's name has at most {MAX_NAME} characters, got {len(text)}")
    return text


def read_whole_within(value: Any, source: str, low: int, high: int | None = None) -> int:
    """:func:`read_whole` of ``low`` or more, and at most ``high``. Raises TypeError and ValueError."""
    number = read_whole(value, source)
    if number < low or (high is not None and number > high):
        expected = f"{low} or more" if high is None else f"{low}..{high}"
        raise ValueError(f"{source}={number}: expected {expected}")
    return number


def read_patterns(given: object, source: str) -> tuple[str, ...]:
    """Globs of tensors' names. Raises TypeError for what is no list of text, ValueError."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{source}={given!r}: expected a list of globs of tensors' names such as ['*.bias']")
    patterns = tuple(read_text(pattern, f"a pattern in {source}") for pattern in given)
    if len(patterns) > MAX_EXCLUDE:
        raise ValueError(f"{source}: expected at most {MAX_EXCLUDE} patterns, got {len(patterns)}")
    for pattern in patterns:
        if not 0 < len(pattern) <= MAX_NAME:
            raise ValueError(f"{source}: a pattern has 1 to {MAX_NAME} characters, got {len(pattern)}")
    return patterns


def read_shape(given: tuple[object, ...]) -> tuple[int, ...]:
    """A shape given as ``f(2, 3)`` or ``f((2, 3))``. Raises TypeError and ValueError that say what came."""
    dimensions = tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    try:
        shape = tuple(read_whole(d, "shape") for d in dimensions)
    except TypeError:
        raise TypeError(f"shape={dimensions!r}: expected {_SHAPE_FORM}") from None
    if any(d < 0 for d in shape):
        raise ValueError(f"shape={shape!r}: expected {_SHAPE_FORM}")
    # Each by itself too: beside a 0 the product says nothing.
    if max(math.prod(shape), *shape, 0) > MAX_SECTION_ELEMENTS:
        raise ValueError(f"shape={shape!r}: a tensor has at most {MAX_SECTION_ELEMENTS} elements")
    return shape


def read_limit(deadline: Any, environ: Mapping[str, str]) -> float:
    """Seconds; 0 leaves it to the daemon. Raises ValueError that names where the value came from."""
    source, raw = "deadline", deadline
    if raw is None:
        source, raw = "GC_JOB_DEADLINE", environ.get("GC_JOB_DEADLINE")
    if raw is None or raw == "":
        return 0.0
    try:
        return read_duration(raw if isinstance(raw, str | bool) else float(raw))
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{source}={raw}: expected {DURATION_FORM}") from None


def read_seed(seed: object, environ: Mapping[str, str]) -> int | None:
    """None: to be drawn. Raises TypeError and ValueError that name where the value came from."""
    source = "seed"
    if seed is not None:
        number = read_whole(seed, source)
    elif environ.get("GC_SEED"):
        source = "GC_SEED"
        try:
            number = int(environ[source], 0)
        except ValueError:
            raise ValueError(f"GC_SEED={environ[source]}: expected a whole number") from None
    else:
        return None
    if not 0 <= number <= LAST_SEED:
        raise ValueError(f"{source}={number}: expected 0..{LAST_SEED}")
    return number
