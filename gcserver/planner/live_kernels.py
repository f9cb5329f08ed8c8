"""The compiled step of a running job: who encodes, sends, adds and decodes what, one job at a time on each resource.

What may live here: the graph of jobs of one step, and its timeline. What may not: prices (`live.py`), decisions.

A job waits for the jobs before it and then takes its turn on its resource, in order of arrival; of two that arrive at
the same moment the one made first goes first. A message takes its time on the sender's link and, begun one latency
later, on the receiver's. Every node has a worker, a link out, a link in and its lanes, in this order.

With more members than are simulated (``nodes`` is 1 then), the one node stands for all: it owns an equal share of every
block, so that its work and its traffic are those of the mean node.
"""

from __future__ import annotations

import heapq

import numpy as np

from gcserver.planner.timeline_jit import kernel

#: columns of a price: what a block costs under an option. Seconds but for the first two.
SCHEME, STAGES, ENCODE, MIDDLE, FIRST, ADD, FINISH, DECODE, SEND = range(9)
#: values of SCHEME
OWNER, ALL = 0, 1
#: columns of ``place``
PORTION, HOME, LANE = range(3)
#: resources of a node
WORKER, LINK_OUT, LINK_IN, FIRST_LANE = range(4)
#: kinds of jobs
COPY_IN, ENCODING, SENDING, RECEIVING, ADDING, FINISHING, DECODING, COPY_OUT = range(8)
#: columns of jobs, integers: resource, jobs to wait for, first edge, kind, block or portion
RESOURCE, WAITS, HEAD, KIND, WHAT = range(5)
#: and seconds: how long, ready, start, end, and after its start when a message begins to arrive (-1: no message)
LONG, READY, START, END, ARRIVES = range(5)


@kernel
def _job(ints, floats, count, resource, kind, what, seconds):  # type: ignore[no-untyped-def]
    """A new job; its index."""
    i = count[0]
    count[0] += 1
    ints[i, RESOURCE], ints[i, WAITS], ints[i, HEAD], ints[i, KIND], ints[i, WHAT] = resource, 0, -1, kind, what
    floats[i, LONG], floats[i, READY], floats[i, ARRIVES] = seconds, 0.0, -1.0
    return i


@kernel
def _after(ints, edges, count, before, job):  # type: ignore[no-untyped-def]
    """``job`` waits for ``before``."""
    e = count[1]
    count[1] += 1
    edges[e, 0], edges[e, 1] = job, ints[before, HEAD]
    ints[before, HEAD] = e
    ints[job, WAITS] += 1


@kernel
def _message(ints, floats, edges, count, width, latency, source, target, what, before, out, into):  # type: ignore[no-untyped-def]
    """From ``source`` to ``target`` after ``before``, ``out`` and ``into`` seconds on either link; its arrival."""
    sent = _job(ints, floats, count, source * width + LINK_OUT, SENDING, what, out)
    _after(ints, edges, count, before, sent)
    got = _job(ints, floats, count, target * width + LINK_IN, RECEIVING, what, into)
    floats[sent, ARRIVES] = latency
    _after(ints, edges, count, sent, got)
    return got


@kernel
def _then(ints, floats, edges, count, resource, kind, what, seconds, before):  # type: ignore[no-untyped-def]
    """A new job after ``before``."""
    i = _job(ints, floats, count, resource, kind, what, seconds)
    _after(ints, edges, count, before, i)
    return i


@kernel
def _owned(ints, floats, edges, count, width, latency, turn, nodes, b, home, lane, price, own):  # type: ignore[no-untyped-def]
    """A block through its owner: own[v] begins as v's encoding, ends as what v's copy out waits for."""
    stages = int(price[STAGES])
    for stage in range(stages):
        last = stage == stages - 1
        added = -1
        for v in range(nodes):
            come = own[v]
            if v != home:
                send = price[SEND]
                come = _message(ints, floats, edges, count, width, latency, v, home, b, come, send, send)
            seconds = price[FIRST] if v == 0 else price[ADD]
            add = _then(ints, floats, edges, count, home * width + FIRST_LANE + lane, ADDING, b, seconds, come)
            if added >= 0:
                _after(ints, edges, count, added, add)
            added = add
        if last:
            done = price[FINISH] + turn
            added = _then(ints, floats, edges, count, home * width + FIRST_LANE + lane, FINISHING, b, done, added)
        for v in range(nodes):
            come, kind, seconds = added, ENCODING, price[MIDDLE]
            if last:
                kind, seconds = DECODING, price[DECODE] + turn
            if v != home:
                send = price[SEND]
                come = _message(ints, floats, edges, count, width, latency, home, v, b, added, send, send)
            elif last:
                own[v] = added
                continue
            own[v] = _then(ints, floats, edges, count, v * width + FIRST_LANE + lane, kind, b, seconds, come)


@kernel
def _everyone(ints, floats, edges, count, width, latency, turn, nodes, b, lane, price, own):  # type: ignore[no-untyped-def]
    """A block from everyone to everyone; ``own`` as above."""
    encoded = own.copy()
    come = np.empty((nodes, nodes), np.int64)
    for v in range(nodes):
        come[v, v] = encoded[v]
        # Messages to several nodes share a link; one after the other, they must not all begin with the same receiver.
        for turned in range(1, nodes):
            w, send = (v + turned) % nodes, price[SEND]
            come[v, w] = _message(ints, floats, edges, count, width, latency, v, w, b, encoded[v], send, send)
    for w in range(nodes):
        added = -1
        for v in range(nodes):
            seconds = price[FIRST] if v == 0 else price[ADD]
            add = _then(ints, floats, edges, count, w * width + FIRST_LANE + lane, ADDING, b, seconds, come[v, w])
            if added >= 0:
                _after(ints, edges, count, added, add)
            added = add
        done = price[FINISH] + turn
        own[w] = _then(ints, floats, edges, count, w * width + FIRST_LANE + lane, FINISHING, b, done, added)


@kernel
def _mean(ints, floats, edges, count, width, latency, turn, members, b, lane, price, own):  # type: ignore[no-untyped-def]
    """A block at the node that stands for all ``members``."""
    cpu, come = FIRST_LANE + lane, own[0]
    if price[SCHEME] == ALL:
        send = price[SEND] * (members - 1)
        come = _message(ints, floats, edges, count, width, latency, 0, 0, b, come, send, send)
        adding = price[FIRST] + (members - 1) * price[ADD]
        come = _then(ints, floats, edges, count, cpu, ADDING, b, adding, come)
        own[0] = _then(ints, floats, edges, count, cpu, FINISHING, b, price[FINISH] + turn, come)
        return
    others = (members - 1) / members
    send = price[SEND] * others
    stages = int(price[STAGES])
    for stage in range(stages):
        last = stage == stages - 1
        come = _message(ints, floats, edges, count, width, latency, 0, 0, b, come, send, send)
        adding = price[FIRST] / members + price[ADD] * others
        if last:
            adding += price[FINISH] / members
        come = _then(ints, floats, edges, count, cpu, ADDING, b, adding, come)
        come = _message(ints, floats, edges, count, width, latency, 0, 0, b, come, send, send)
        if last:
            come = _then(ints, floats, edges, count, cpu, DECODING, b, price[DECODE] * others + turn, come)
        else:
            come = _then(ints, floats, edges, count, cpu, ENCODING, b, price[MIDDLE], come)
    own[0] = come


@kernel
def _most_jobs(nodes, portions, prices, choice):  # type: ignore[no-untyped-def]
    """As many jobs as a step can have."""
    total = nodes * portions
    for b in range(len(choice)):
        total += 2 * nodes
        if prices[b, choice[b], SCHEME] == ALL:
            total += nodes * (3 * nodes + 2)
        else:
            total += int(prices[b, choice[b], STAGES]) * (6 * nodes + 3)
    return total


@kernel
def simulate(members, nodes, width, latency, turn, portion, place, back, prices, choice):  # type: ignore[no-untyped-def]
    """(end, spans, ints, floats): the timeline of one step from its first gradient on, seconds.

    width: resources of a node. turn: half of what a block costs a lane besides its bytes. portion: float64[P, 2], ready
    and seconds to copy in. place: int64[B, 3]. back: float64[B], seconds to copy out. prices: float64[B, K, 9]. choice:
    int64[B], columns of prices. spans: float64[B, 2], when a block is in the arena and when its last copy out ends.
    ints, floats: the jobs, int64[J, 5] and float64[J, 5].
    """
    most = _most_jobs(nodes, len(portion), prices, choice)
    ints, floats = np.empty((most, 5), np.int64), np.zeros((most, 5))
    edges, count = np.empty((2 * most, 2), np.int64), np.zeros(2, np.int64)
    for v in range(nodes):
        for p in range(len(portion)):
            copy = _job(ints, floats, count, v * width + WORKER, COPY_IN, p, portion[p, 1])
            floats[copy, READY] = portion[p, 0]
    own = np.empty(nodes, np.int64)
    for b in range(len(choice)):
        price, lane, home = prices[b, choice[b]], place[b, LANE], place[b, HOME]
        for v in range(nodes):
            copied, cpu = v * len(portion) + place[b, PORTION], v * width + FIRST_LANE + lane
            own[v] = _then(ints, floats, edges, count, cpu, ENCODING, b, price[ENCODE] + turn, copied)
        if members > nodes:
            _mean(ints, floats, edges, count, width, latency, turn, members, b, lane, price, own)
        elif price[SCHEME] == ALL:
            _everyone(ints, floats, edges, count, width, latency, turn, nodes, b, lane, price, own)
        else:
            _owned(ints, floats, edges, count, width, latency, turn, nodes, b, home, lane, price, own)
        for v in range(nodes):
            _then(ints, floats, edges, count, v * width + WORKER, COPY_OUT, b, back[b], own[v])
    return _run(nodes * width, len(choice), ints[: count[0]], floats[: count[0]], edges)


@kernel
def _run(resources, blocks, ints, floats, edges):  # type: ignore[no-untyped-def]
    free, end = np.zeros(resources), 0.0
    spans = np.empty((blocks, 2))
    spans[:, 0], spans[:, 1] = np.inf, 0.0
    waiting = [(0.0, np.int64(0)) for _ in range(0)]
    for first in range(len(ints)):
        if ints[first, WAITS] == 0:
            heapq.heappush(waiting, (floats[first, READY], np.int64(first)))
    while len(waiting) > 0:
        ready, i = heapq.heappop(waiting)
        start = max(ready, free[ints[i, RESOURCE]])
        stop = start + floats[i, LONG]
        free[ints[i, RESOURCE]] = stop
        floats[i, START], floats[i, END] = start, stop
        end = max(end, stop)
        if ints[i, KIND] != COPY_IN:
            b = ints[i, WHAT]
            spans[b, 0], spans[b, 1] = min(spans[b, 0], ready), max(spans[b, 1], stop)
        passed = stop if floats[i, ARRIVES] < 0 else start + floats[i, ARRIVES]
        e = ints[i, HEAD]
        while e >= 0:
            j = edges[e, 0]
            floats[j, READY] = max(floats[j, READY], passed)
            ints[j, WAITS] -= 1
            if ints[j, WAITS] == 0:
                heapq.heappush(waiting, (floats[j, READY], j))
            e = edges[e, 1]
    return end, spans, ints, floats
