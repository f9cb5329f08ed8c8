"""What a plan gives each group of tensors, and why, in one sentence.

What may live here: rows and sentences about a decision that was taken. What may not: decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from gcserver.planner.auto_options import DENSE_COLUMNS
from gcserver.planner.errors import F64, I64
from gcserver.planner.live import ALL, OWNER, BlockOption, Live
from gcserver.planner.live_layout import Portions
from gcserver.values import human_duration

#: Seconds below which two steps are the same.
SAME = 1e-6


class GroupWhy(msgspec.Struct, frozen=True):
    """Tensors of one group that travel alike.

    bytes: of their gradients. seconds: from the moment the first of their blocks is in the arena until the last is
    back in the worker, as predicted. why: what another option would change.
    """

    tensors: tuple[str, ...]
    bytes: int
    codec: str
    scheme: str
    seconds: float
    why: str


def explain(
    live: Live,
    table: F64,
    columns: I64,
    options: Sequence[Sequence[BlockOption]],
    groups: Portions,
    notes: Sequence[str],
) -> tuple[GroupWhy, ...]:
    """Rows in the order of the groups; within one, tensors that travel with blocks of one option.

    table: prices of ``options``, as `auto_options` orders them. columns: int64[B], what was chosen. notes: for each
    block what forced its option, or nothing.
    """
    best, spans = live.run(table, columns)
    main: dict[int, tuple[int, int]] = {}
    for index, block in enumerate(live.blocks):
        for tensor, elements in block.parts:
            if elements > main.get(tensor, (0, 0))[0]:
                main[tensor] = (elements, index)
    rows = []
    for group in groups:
        held: dict[BlockOption, list[int]] = {}
        for tensor in group:
            if tensor in main:
                at = main[tensor][1]
                settled = live.settled(at, options[columns[at]][at])
                held.setdefault(BlockOption(settled.spec, settled.scheme), []).append(tensor)
        for option, tensors in held.items():
            blocks = sorted({main[t][1] for t in tensors})
            nbytes = sum(live.profile.tensors[t].elements * live.blocks[main[t][1]].dtype.itemsize for t in tensors)
            seconds = float(spans[blocks, 1].max() - spans[blocks, 0].min())
            why = _why(live, table, columns, blocks, best, notes)
            names = tuple(live.profile.tensors[t].name for t in tensors)
            rows.append(GroupWhy(names, nbytes, option.spec, option.scheme, seconds, why))
    return tuple(rows)


def _why(live: Live, table: F64, columns: I64, blocks: list[int], best: float, notes: Sequence[str]) -> str:
    """What the other options would change, for these blocks together."""
    if forced := next((notes[b] for b in blocks if notes[b]), ""):
        return forced
    now = int(columns[blocks[0]])
    change = [_changed(live, table, columns, blocks, k) - best for k in range(table.shape[1])]
    dense, compressed = change[:DENSE_COLUMNS], change[DENSE_COLUMNS:]
    if now >= DENSE_COLUMNS:
        least = min(dense)
        text = (
            f"dense would make the step {human_duration(least)} longer"
            if least > SAME
            else "compressed with the others"
        )
    elif compressed:
        least = min(compressed)
        text = f"compressing would make the step {human_duration(least)} longer"
        if least <= SAME:
            text = "compressing would not shorten the step"
    else:
        text = "dense, as the whole plan is"
    # columns come in pairs: over the owner, to all
    other = now ^ 1
    if other < len(change) and change[other] > SAME:
        text += f", scheme {(OWNER, ALL)[other % 2]} {human_duration(change[other])}"
    return text


def _changed(live: Live, table: F64, columns: I64, blocks: list[int], column: int) -> float:
    trial: I64 = np.array(columns)
    trial[blocks] = column
    return live.run(table, trial)[0]
