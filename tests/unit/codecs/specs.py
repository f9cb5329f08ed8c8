"""Specs for tests that go over every codec there is, so that a new one is tested by being there."""

from __future__ import annotations

from gcserver.codecs import names
from gcserver.codecs.base import BY_NAME, show


def choices(name):
    """Parameters of a codec: its defaults, then between them every word and the ends of every whole number."""
    cls = BY_NAME[name]
    usual = {p.name: p.default if p.default is not None else min(max(0.2, p.low), p.high) for p in cls.params}
    found = [usual]
    for p in cls.params:
        ends = p.words or ((p.low, p.high) if p.integer else ())
        found += [usual | {p.name: value} for value in ends]
    return found


def variants(name):
    """Specs of a codec with these parameters, the usual one first."""
    specs = []
    for values in choices(name):
        inner = ",".join(f"{k}={show(v)}" for k, v in values.items())
        spec = f"{name}({inner})" if inner else name
        if spec not in specs:
            specs.append(spec)
    return specs


#: codecs that take any vector; those for matrices exchange frames in rounds and have tests of their own
FLAT = [name for name in names() if BY_NAME[name].layout == "flat"]
USUAL = [variants(name)[0] for name in FLAT]
FEEDBACK = [name for name in FLAT if BY_NAME[name].keeps_residual]
