"""Which codecs exist: the package's own families, and those that other distributions bring.

What may live here: loading both, and the look-ups by spec and by wire id. A third party's codec is an
entry point of the group ``gradcomm.codecs`` whose value is a :class:`Codec` subclass. One that cannot be
loaded disturbs nobody: a warning says so, and asking for it by name says why.
"""

from __future__ import annotations

import pkgutil
import warnings
from functools import cache, lru_cache
from importlib import import_module, metadata

import gcserver.codecs as package
from gcserver.codecs import spec as specs
from gcserver.codecs.base import BY_ID, BY_NAME, Codec, CodecError, register

GROUP = "gradcomm.codecs"
FOREIGN = range(32768, 65536)  #: wire ids of third parties

#: entry points that did not load: name -> reason
_broken: dict[str, str] = {}


@cache
def load() -> None:
    """Import every family and entry point, once; families register themselves when imported."""
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        # Found, not listed: a new family is a new file and nothing else.
        import_module(f"{package.__name__}.{module}")
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda p: p.name):
        try:
            _adopt(point)
        except Exception as error:  # somebody else's code: whatever it raises must not stop a daemon
            source = point.dist.name if point.dist else "?"
            _broken[point.name] = f"entry point {point.value} of {source}: {type(error).__name__}: {error}"
            warnings.warn(f"codec {point.name!r} is not available: {_broken[point.name]}", stacklevel=2)


def _adopt(point: metadata.EntryPoint) -> None:
    cls = point.load()
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise CodecError("entry point", "a subclass of gcserver.codecs.Codec", repr(cls))
    if cls.name != point.name:
        raise CodecError("entry point", f"the codec's name, {cls.name!r}", repr(point.name))
    if cls.id not in FOREIGN:
        raise CodecError("codec id", f"{FOREIGN[0]}..{FOREIGN[-1]} for third parties", cls.id)
    register(cls)


def names() -> list[str]:
    """The registered codecs' names, in the order of their ids."""
    load()
    return [cls.name for _, cls in sorted(BY_ID.items())]


@lru_cache(maxsize=512)
def parse(spec: str) -> Codec:
    """The codec a spec string names: ``fp16``, ``topk(ratio=0.01)``, ``topk(ratio=0.01)+ef(decay=0.9)``.

    ``parse(c.spec)`` is equivalent to ``c``. Raises CodecError that names what would be accepted.
    """
    load()
    first, *decorators = specs.split(spec)
    cls = BY_NAME.get(first.name)
    if cls is None:
        raise CodecError("codec", f"one of {', '.join(names())}", repr(first.name), _broken.get(first.name, ""))
    takers = {
        "ef": [n for n in names() if BY_NAME[n].keeps_residual],
        "momentum": [n for n in names() if BY_NAME[n].takes_momentum],
    }
    values = specs.read(cls.name, cls.params, first.given)
    return cls(**values, **specs.decorate(cls.name, takers, decorators))  # type: ignore[arg-type]


@lru_cache(maxsize=512)
def by_id(id: int, level: int) -> Codec:
    """A codec able to decode frames whose header says ``id`` and ``level``; CodecError if there is none."""
    load()
    cls = BY_ID.get(id)
    if cls is None:
        known = ", ".join(f"{i} ({c.name})" for i, c in sorted(BY_ID.items()))
        raise CodecError("codec id", f"one of {known}", id)
    return cls.from_level(level)
