"""The compiled step of a running job: who encodes, sends, adds and decodes what, one job at a time on each resource.

What may live here: the graph of jobs of one step, and its timeline. What may not: prices (`live.py`), decisions.

A job waits for the jobs before it and then takes its turn on its resource, in order of arrival. Every node has a
worker, a link out, a link in and its lanes, in this order.

From each node to each other one there is a connection, which sends one message after the other. Connections share a
link in turns of a quantum, as TCP does: a quantum takes its time on the sender's link and, begun one latency later, on
the receiver's, and the next one of its connection leaves when it would arrive no sooner than that one is taken in.

With more members than are simulated (``nodes`` is 1 then), the one node stands for all: it owns an equal share of every
block, so that its work and its traffic are those of the mean node.
"""

from __future__ import annotations

import heapq

import numpy as np

from gcserver.planner.timeline_jit import kernel

#: columns of a price: what a block costs under an option. Seconds but for the first two. The timeline leaves out the
#: last, the mean node's CPU time outside its workers.
COLUMNS = 10
SCHEME, STAGES, ENCODE, MIDDLE, FIRST, ADD, FINISH, DECODE, SEND, CPU = range(COLUMNS)
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
#: and seconds: how long, ready, start, end, and of a message what is still to be sent
LONG, READY, START, END, LEFT = range(5)


@kernel
def _job(ints, floats, count, resource, kind, what, seconds):  # type: ignore[no-untyped-def]
    """A new job; its index."""
    i = count[0]
    count[0] += 1
    ints[i, RESOURCE], ints[i, WAITS], ints[i, HEAD], ints[i, KIND], ints[i, WHAT] = resource, 0, -1, kind, what
    floats[i, LONG], floats[i, READY], floats[i, LEFT] = seconds, 0.0, seconds
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
def _message(ints, floats, edges, count, width, source, target, what, before, seconds):  # type: ignore[no-untyped-def]
    """From ``source`` to ``target`` after ``before``, so many seconds on either link; its arrival, the job after it."""
    sent = _job(ints, floats, count, source * width + LINK_OUT, SENDING, what, seconds)
    _after(ints, edges, count, before, sent)
    return _job(ints, floats, count, target * width + LINK_IN, RECEIVING, what, seconds)


@kernel
def _then(ints, floats, edges, count, resource, kind, what, seconds, before):  # type: ignore[no-untyped-def]
    """A new job after ``before``."""
    i = _job(ints, floats, count, resource, kind, what, seconds)
    _after(ints, edges, count, before, i)
    return i


@kernel
def _owned(ints, floats, edges, count, width, turn, nodes, b, home, lane, price, own):  # type: ignore[no-untyped-def]
    """A block through its owner: own[v] begins as v's encoding, ends as what v's copy out waits for."""
    stages = int(price[STAGES])
    for stage in range(stages):
        last = stage == stages - 1
        added = -1
        for v in range(nodes):
            come = own[v]
            if v != home:
                come = _message(ints, floats, edges, count, width, v, home, b, come, price[SEND])
            seconds = price[FIRST] if v == 0 else price[ADD]
            add = _then(ints, floats, edges, count, home * width + FIRST_LANE + lane, ADDING, b, seconds, come)
            if added >= 0:
                _after(ints, edges, count, added, add)
            added = add
        if last:
            done = price[FINISH] + turn
            added = _then(ints, floats, edges, count, home * width + FIRST_LANE + lane, FINISHING, b, done, added)
        for v in range(nodes):
            come, kind, seconds = added, ENCODING, price[MIDDLE] + turn
            if last:
                kind, seconds = DECODING, price[DECODE] + turn
            if v != home:
                come = _message(ints, floats, edges, count, width, home, v, b, added, price[SEND])
            elif last:
                own[v] = added
                continue
            own[v] = _then(ints, floats, edges, count, v * width + FIRST_LANE + lane, kind, b, seconds, come)


@kernel
def _everyone(ints, floats, edges, count, width, turn, nodes, b, lane, price, own):  # type: ignore[no-untyped-def]
    """A block from everyone to everyone; ``own`` as above."""
    encoded = own.copy()
    come = np.empty((nodes, nodes), np.int64)
    for v in range(nodes):
        come[v, v] = encoded[v]
        # not all begin with the same receiver
        for turned in range(1, nodes):
            w = (v + turned) % nodes
            come[v, w] = _message(ints, floats, edges, count, width, v, w, b, encoded[v], price[SEND])
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
def _mean(ints, floats, edges, count, width, turn, members, b, lane, price, own):  # type: ignore[no-untyped-def]
    """A block at the node that stands for all ``members``."""
    cpu, come = FIRST_LANE + lane, own[0]
    if price[SCHEME] == ALL:
        send = price[SEND] * (members - 1)
        come = _message(ints, floats, edges, count, width, 0, 0, b, come, send)
        adding = price[FIRST] + (members - 1) * price[ADD]
        come = _then(ints, floats, edges, count, cpu, ADDING, b, adding, come)
        own[0] = _then(ints, floats, edges, count, cpu, FINISHING, b, price[FINISH] + turn, come)
        return
    others = (members - 1) / members
    send = price[SEND] * others
    stages = int(price[STAGES])
    for stage in range(stages):
        last = stage == stages - 1
        come = _message(ints, floats, edges, count, width, 0, 0, b, come, send)
        adding = price[FIRST] / members + price[ADD] * others
        if last:
            adding += price[FINISH] / members
        come = _then(ints, floats, edges, count, cpu, ADDING, b, adding, come)
        come = _message(ints, floats, edges, count, width, 0, 0, b, come, send)
        if last:
            come = _then(ints, floats, edges, count, cpu, DECODING, b, price[DECODE] * others + turn, come)
        else:
            come = _then(ints, floats, edges, count, cpu, ENCODING, b, price[MIDDLE] + turn, come)
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
def simulate(members, nodes, width, latency, quantum, turn, portion, place, back, prices, choice):  # type: ignore[no-untyped-def]
    """(end, spans, ints, floats): the timeline of one step from its first gradient on, seconds.

    width: resources of a node. quantum: seconds a connection has the link in one turn. turn: what each of a block's
    turns on a lane costs besides its bytes: encoding it, each further encoding, and the end. portion: float64[P, 2],
    ready and seconds to copy in. place: int64[B, 3]. back: float64[B], seconds to copy out. prices: float64[B, K, 10].
    choice: int64[B], columns of prices. spans: float64[B, 2], when a block is in the arena and when its last copy out
    ends. ints, floats: the jobs, int64[J, 5] and float64[J, 5]; messages of several connections overlap.
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
            _mean(ints, floats, edges, count, width, turn, members, b, lane, price, own)
        elif price[SCHEME] == ALL:
            _everyone(ints, floats, edges, count, width, turn, nodes, b, lane, price, own)
        else:
            _owned(ints, floats, edges, count, width, turn, nodes, b, home, lane, price, own)
        for v in range(nodes):
            _then(ints, floats, edges, count, v * width + WORKER, COPY_OUT, b, back[b], own[v])
    return _run(nodes, width, latency, quantum, len(choice), ints[: count[0]], floats[: count[0]], edges)


@kernel
def _run(nodes, width, latency, quantum, blocks, ints, floats, edges):  # type: ignore[no-untyped-def]
    free, end = np.zeros(nodes * width), 0.0
    spans = np.empty((blocks, 2))
    spans[:, 0], spans[:, 1] = np.inf, 0.0
    # of each connection: the message under way, and the last that waits; of a message the one that waits behind it
    under_way, last = np.full(nodes * nodes, -1), np.full(nodes * nodes, -1)
    behind = np.full(len(ints), -1)
    # (when, in which order of those at one moment, job): as they were made, then messages that had a turn before
    waiting = [(0.0, np.int64(0), np.int64(0)) for _ in range(0)]
    ticket = len(ints)
    for first in range(len(ints)):
        if ints[first, WAITS] == 0 and ints[first, KIND] != RECEIVING:
            heapq.heappush(waiting, (floats[first, READY], np.int64(first), np.int64(first)))
    while len(waiting) > 0:
        now, turn, i = heapq.heappop(waiting)
        resource, done = ints[i, RESOURCE], i
        if ints[i, KIND] == SENDING:
            done = i + 1
            connection = resource // width * nodes + ints[done, RESOURCE] // width
            if under_way[connection] == -1:
                under_way[connection], last[connection] = i, i
                floats[i, START] = floats[done, START] = -1.0
            elif under_way[connection] != i:
                behind[last[connection]], last[connection] = i, i
                continue
            if free[resource] > now:
                heapq.heappush(waiting, (free[resource], turn, i))
                continue
            long = min(quantum, floats[i, LEFT])
            # what rounding leaves is no message
            floats[i, LEFT] = floats[i, LEFT] - long if floats[i, LEFT] > long * (1 + 1e-9) else 0.0
            arrives = max(now + latency, free[ints[done, RESOURCE]])
            if floats[i, START] < 0:
                floats[i, START], floats[done, START] = now, arrives
            free[resource], free[ints[done, RESOURCE]] = now + long, arrives + long
            floats[i, END], stop = now + long, arrives + long
            ahead, ticket = max(now + long, stop - latency), ticket + 1
            if floats[i, LEFT] > 0:
                heapq.heappush(waiting, (ahead, np.int64(ticket), i))
                continue
            under_way[connection] = -1
            if behind[i] >= 0:
                under_way[connection] = behind[i]
                floats[behind[i], START] = floats[behind[i] + 1, START] = -1.0
                heapq.heappush(waiting, (ahead, np.int64(ticket), np.int64(behind[i])))
            floats[done, READY] = floats[done, START]
        else:
            start = max(now, free[resource])
            stop = start + floats[i, LONG]
            free[resource], floats[i, START] = stop, start
        floats[done, END] = stop
        end = max(end, stop)
        if ints[i, KIND] != COPY_IN:
            b = ints[i, WHAT]
            spans[b, 0], spans[b, 1] = min(spans[b, 0], floats[i, READY]), max(spans[b, 1], stop)
        e = ints[done, HEAD]
        while e >= 0:
            j = edges[e, 0]
            floats[j, READY] = max(floats[j, READY], stop)
            ints[j, WAITS] -= 1
            if ints[j, WAITS] == 0:
                heapq.heappush(waiting, (floats[j, READY], j, j))
            e = edges[e, 1]
    return end, spans, ints, floats
