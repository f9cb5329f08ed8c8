"""What runs say when they are compared: the table, the picture, and up to which bandwidth gradcomm pays.

What may live here: figures from finished runs. What may not: starting anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from examples.runs import WINDOW, Record


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where compression stops helping, and the numbers behind it: seconds and bytes sent a step."""

    bits_per_second: float | None  # None: its cost was too small to be seen
    compute_seconds: float
    gradcomm_seconds: float
    plain_bytes: float
    gradcomm_bytes: float


def break_even(plain: Record, compute: Record, gradcomm: Record) -> BreakEven:
    """The bandwidth above which compression takes longer than it saves.

    plain: any run that sends uncompressed gradients, for its bytes V_plain. compute: a run that communicates nothing,
    C seconds a step. gradcomm: a compressed run on links that were not shaped, T seconds a step; T - C is what
    compressing, copying and waking up cost the processor when the link costs nothing. On links of B bit/s a compressed
    step takes T + 8 V_gradcomm / B, and no uncompressed one can take less than C + 8 V_plain / B. Setting both equal,

        B = 8 (V_plain - V_gradcomm) / (T - C).

    Above B compression cannot win. The rival is ideal (its averaging costs no processor time, which gloo's does), and
    neither side is credited with hiding communication behind computation: this model's gradients come nearly in one
    piece at the end. With cores to spare beside the training process, T - C is smaller and B higher.
    """
    compute_seconds, seconds = compute.step_seconds(), gradcomm.step_seconds()
    plain_bytes, sent = plain.step_bytes(), gradcomm.step_bytes()
    bits = 8 * (plain_bytes - sent) / (seconds - compute_seconds) if seconds > compute_seconds else None
    return BreakEven(bits, compute_seconds, seconds, plain_bytes, sent)


def say_break_even(b: BreakEven) -> str:
    """The same in a sentence or two."""
    base = (
        f"Computing alone takes {common.show_seconds(b.compute_seconds)} a step, with compression on unshaped links "
        f"{common.show_seconds(b.gradcomm_seconds)}; it sends {b.gradcomm_bytes / 1e6:.2f} MB instead of "
        f"{b.plain_bytes / 1e6:.1f}."
    )
    if b.bits_per_second is None:
        return f"{base} Its cost is too small to be seen here, so no bandwidth above which it stops helping was found."
    return (
        f"{base} So for this model on this machine gradcomm stops helping above about {show_rate(b.bits_per_second)}."
    )


def show_rate(bits: float) -> str:
    """Two digits of it: 870 Mbit/s, 2.1 Gbit/s."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= scale:
            value = bits / scale
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{bits / 1e3:.0f} kbit/s"


def common_step(records: Sequence[Record]) -> int:
    """The last step that every run reached."""
    return min(len(r.steps) for r in records)


def rows(timed: Sequence[Record], long: Mapping[str, Record], rate: str | None) -> list[common.Row]:
    """A row a method: ten timed steps of each, and where it was trained for longer, the loss of that."""
    base = timed[0].step_seconds()
    at = common_step(list(long.values())) if long else 0
    out = []
    for record in timed:
        method = record.method
        row = common.median_row(
            "gloo" if method.comm == "gloo" else "gradcomm",
            record.durations(2),
            method=method.name,
            codec=method.codec or "none",
            nodes=len(record.steps[0].sent),
            network=rate or "loopback",
            step_bytes=record.step_bytes(),
            speedup=base / record.step_seconds(),
            loss_timed_steps=record.loss_at(len(record.steps)),
        )
        longer = long.get(method.name)
        if longer is not None:
            row |= {
                "loss_compared_at_step": at,
                "loss_compared": longer.loss_at(at),
                "steps": len(longer.steps),
                "seconds": longer.steps[-1].seconds,
                "loss_end": longer.loss_at(len(longer.steps)),
            }
        out.append(row)
    return out


def table(rows: Sequence[common.Row]) -> str:
    """The rows for a terminal, gloo first."""
    at = next((r["loss_compared_at_step"] for r in rows if "loss_compared_at_step" in r), 0)
    seconds = next((r["seconds"] for r in rows if "seconds" in r), 0.0)
    after, end = f"loss, {at} steps", f"loss, {seconds:.0f} s"
    widths = {"": 24, "step": 10, "MB sent": 10, "speed-up": 10, after: len(after) + 3, end: len(end) + 16}
    out = common.Table(widths)
    lines = [out.head()]
    for r in rows:
        trained = "loss_compared" in r
        lines.append(
            out.line(
                r["method"],
                common.show_seconds(r["median_s"]),
                f"{r['step_bytes'] / 1e6:.2f}",
                f"{r['speedup']:.2f}x",
                f"{r['loss_compared']:.3f}" if trained else "-",
                f"{r['loss_end']:.3f} ({r['steps']} steps)" if trained else "-",
            )
        )
    return "\n".join(lines)


def plot(long: Mapping[str, Record], rows: Sequence[common.Row], title: str, path: Path) -> None:
    """Loss against time, loss against steps, step times; a PNG well below 200 kB."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_step, bars) = pyplot.subplots(1, 3, figsize=(11, 3.6), dpi=100, layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(r["method"] for r in rows)}
    for name, record in long.items():
        steps = range(1, len(record.steps) + 1)
        losses = [record.loss_at(i) for i in steps]
        by_time.plot([s.seconds for s in record.steps], losses, color=colours[name], label=name)
        by_step.plot(steps, losses, color=colours[name], label=name)
    by_time.set(xlabel="seconds", ylabel=f"loss, nats a character (mean of {WINDOW} steps)", title="loss against time")
    by_step.set(xlabel="steps", title="loss against steps")
    if long:
        by_time.legend(frameon=False)
        by_step.set_xlim(0, 2.5 * common_step(list(long.values())))
    names = [r["method"] for r in rows]
    drawn = bars.barh(names, [r["median_s"] for r in rows], color=[colours[n] for n in names])
    bars.bar_label(drawn, [f"{r['median_s']:.2f} s, {r['speedup']:.1f}x" for r in rows], padding=3)
    bars.set(xlabel="seconds", title="time of a step")
    bars.set_xlim(0, 1.45 * max(r["median_s"] for r in rows))
    bars.invert_yaxis()
    for axes in (by_time, by_step, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
