"""Members that average by powersgd, with memory between guard zones, and steps among them: for its tests.

What may live here: running steps and taking payloads apart. What may not: what they should be (`powersgd_oracle.py`).
"""

import numpy as np

from tests.unit.codecs import powersgd_oracle as oracle
from tests.unit.codecs import vectors


class Node:
    """One member: its codec, state versions and memory between guard zones."""

    def __init__(self, codec, shapes):
        self.codec, self.shapes = codec, tuple(shapes)
        sizes = [r * c if c else r for r, c in shapes]
        self.segments = np.cumsum([0, *sizes]).astype(np.int64)
        self.n = int(self.segments[-1])
        self.state = np.zeros(codec.state_floats(self.n, len(shapes), self.shapes), np.float32)
        self.levels = None

    def begin(self, x, scale=1.0, seed=7):
        codec = self.codec
        self.checks = []
        self.work = self.guard(4 * codec.work_floats(self.shapes, self.levels)).view(np.float32)
        self.work[:] = np.nan  # scratch holds anything
        self.next = self.guard(4 * self.state.size).view(np.float32)
        self.pay = [self.guard(codec.payload_bytes(stage, self.shapes, self.levels)) for stage in (0, 1)]
        self.out = self.guard(4 * self.n).view(np.float32)
        self.encoded = codec.begin(
            x, self.state, self.next, self.work, self.pay[0], self.segments, self.shapes, scale, seed, self.levels
        )
        assert self.encoded.nbytes == self.pay[0].size
        return self.vector(0)

    def vector(self, stage):
        """What this member's payload decodes to."""
        return decoded(self.codec, self.pay[stage])

    def guard(self, nbytes):
        array, check = vectors.guarded(nbytes)
        self.checks.append(check)
        return array

    def middle(self, aggregate):
        args = self.next, self.work, self.pay[1], self.segments, self.shapes, self.levels
        self.second = self.codec.middle(aggregate, *args)
        assert self.second.nbytes == self.pay[1].size
        return self.vector(1)

    def stored(self, stage, x):
        """A sum as all members have it that this one, its owner, sends."""
        out = self.guard(self.codec.payload_bytes(stage, self.shapes, self.levels))
        self.codec.store(stage, x, out, self.shapes, self.levels)
        return decoded(self.codec, out)

    def finish(self, aggregate, divisor, exact=None):
        args = self.next, self.work, self.out, self.segments, self.shapes, divisor, self.levels
        self.bad = self.codec.finish(aggregate, *args, exact)
        for check in self.checks:
            check()
        return self.out

    def settle(self):
        self.state = self.next.copy()


def total(payloads):
    """Summed in member order."""
    result = payloads[0].copy()
    for payload in payloads[1:]:
        result += payload
    return result


def decoded(codec, payload):
    """float32 of a payload; where that is no view of it, written between guard zones."""
    if codec.plain:
        return payload.view(np.float32)
    out, check = vectors.guarded(4 * codec.floats_in(payload))
    codec.decode(payload, out.view(np.float32))
    check()
    return out.view(np.float32)


def step(nodes, gradients, scale=1.0, seed=7, settle=True):
    """One step; the first node owns the sums."""
    owner = nodes[0]
    first = total([node.begin(x, scale, seed) for node, x in zip(nodes, gradients, strict=True)])
    first = owner.stored(0, first)
    added = total([node.middle(first) for node in nodes])
    second = owner.stored(1, added)
    outs = [node.finish(second, len(nodes), added if node is owner else None) for node in nodes]
    if settle:
        for node in nodes:
            node.settle()
    return outs, first, second


def matrices(flat, shapes):
    at = 0
    for rows, cols in shapes:
        n = rows * cols if cols else rows
        yield flat[at : at + n].reshape(rows, cols) if cols else flat[at : at + n]
        at += n
    assert at == len(flat)


def pieces(payload, shapes, rank, stage):
    """P (rows x rank) or Q (cols x rank) of each segment, or the segment itself, or nothing."""
    at = 0
    for rows, cols in shapes:
        used = oracle.used_rank(rows, cols, rank)
        length = (rows, cols)[stage] * used if used else 0 if stage else rows * cols if cols else rows
        part = payload[at : at + length]
        yield part.reshape(used, -1).T if used else part
        at += length
    assert at == len(payload)


ODD = ((33, 47), (17, 0), (0, 9), (1, 1), (64, 40), (0, 0), (130, 19), (21, 9000), (9, 0), (6000, 18))
#: of which rank 16 saves something: several strips, rows that fill no tile
LARGE = ((139, 1403), (17, 0), (99, 4101))
