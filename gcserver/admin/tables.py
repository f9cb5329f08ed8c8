"""Answers of the daemon as tables for a person.

What may live here: which columns a person wants, how wide, how numbers are written. What may not: asking the daemon
(`gcctl_calls.py`). Input is what `convert.plain` makes of a message, so a table shows the same as `--json`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Final

from gcserver.values import human_duration, human_size, show_cores

Row = Sequence[object]
#: Columns are no wider than this; what is longer reaches beyond, alone in its row.
_WIDEST: Final = 200


def table(header: Sequence[str], rows: Sequence[Row]) -> str:
    """Columns two spaces apart; a column of numbers only is flush right. Control characters are shown, not obeyed."""
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    widths = [min(_WIDEST, max(len(line[i]) for line in [list(header), *cells])) for i in range(len(header))]

    def line(texts: Sequence[str]) -> str:
        parts = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), *map(line, cells)])


def clean(text: str) -> str:
    """Names come from training programs; an escape sequence in one must not reach the terminal."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c)[0] == "C" else c for c in text) or "-"


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {clean(str(value))}" for name, value in pairs)


def status(s: dict[str, Any]) -> str:
    state = s["state"] + (f": {s['reason']}" if s["reason"] else "")
    pairs = [
        ("node", s["node"]),
        ("state", state),
        ("version", f"gradcomm {s['version']}, protocol {s['protocol_version']}"),
        ("up for", human_duration(s["uptime_seconds"])),
        ("incarnation", s["incarnation"]),
        ("listens on", s["listen"] + (f", advertised as {s['advertise']}" if s["advertise"] != s["listen"] else "")),
        ("arenas", human_size(s["arena_bytes"])),
    ]
    if s["planning_cpu_seconds"]:
        pairs.append(("planning", planning(s["planning_cpu_seconds"])))
    parts = [facts(pairs), lanes(s)]
    parts += [entering(a) for a in s["applicants"]]
    if s["errors"]:
        parts.append(table(("ERROR", "COUNT"), sorted(s["errors"].items())))
    return "\n\n".join(parts)


def planning(seconds: dict[str, float]) -> str:
    """What the planning process has computed, the parts that took longest first."""
    parts = sorted(seconds.items(), key=lambda p: -p[1])
    shown = ", ".join(f"{part} {human_duration(took)}" for part, took in parts)
    return f"{human_duration(sum(seconds.values()))} of CPU time ({shown})"


def lanes(s: dict[str, Any]) -> str:
    rows = [
        (
            lane["index"], lane["state"], lane["pid"], show_cores(lane["cores"]), lane["restarts"],
            human_size(lane["bytes_in"]), human_size(lane["bytes_out"]), lane["rounds"],
        )
        for lane in s["lanes"]
    ]  # fmt: skip
    return table(("LANE", "STATE", "PID", "CORES", "RESTARTS", "IN", "OUT", "ROUNDS"), rows)


def entering(a: dict[str, Any]) -> str:
    """Of a node that waits to be let into a job."""
    since = human_duration(a["since_seconds"])
    return f"{clean(a['node'])} has waited {since} to come into job {clean(a['job'])}: {clean(a['reason'])}"


def peers(answer: dict[str, Any], rates: Callable[[str], tuple[str, str]] | None = None) -> str:
    """``rates``: of a peer by its name, how much comes and goes a second, where that is to be shown too."""
    rows = [
        (
            p["name"], p["address"], p["state"], since(p["since_seconds"] or None),
            since(p["last_heard_seconds"], "{} ago"),
            since(p["rtt_seconds"]), human_size(p["bytes_in"]), human_size(p["bytes_out"]),
            *(rates(p["name"]) if rates else ()), p["frames_resent"],
            p["frames_corrupt"], "yes" if p["encrypted"] else "no", p["reason"],
        )
        for p in answer["peers"]
    ]  # fmt: skip
    if not rows:
        return "no peers"
    moving = ("IN/S", "OUT/S") if rates else ()
    columns = ("STATE", "SINCE", "HEARD", "RTT", "IN", "OUT", *moving, "RESENT", "CORRUPT", "ENCRYPTED", "REASON")
    return table(("PEER", "ADDRESS", *columns), rows)


def since(seconds: float | None, form: str = "{}") -> str:
    return "-" if seconds is None else form.format(human_duration(seconds))


def jobs(answer: dict[str, Any]) -> str:
    if not answer["jobs"]:
        return "no jobs"
    return "\n\n".join(_job(job) for job in answer["jobs"])


def _job(j: dict[str, Any]) -> str:
    members = "; ".join(f"{m['node']}: {show_cores(m['ranks'])}" for m in j["members"]) or "-"
    deadline = f", deadline {human_duration(j['deadline_seconds'])}" if j["deadline_seconds"] else ""
    pairs = [
        ("job", f"{j['label']} ({j['id']})" if j["id"] else j["label"]),
        ("state", j["state"] + (f": {j['reason']}" if j["reason"] else "")),
        ("ranks", f"{j['world_size']} ({members})"),
        ("epoch, step, plan", f"{j['epoch']}, {j['step']}, {j['plan_version']}"),
        ("on loss", j["on_loss"] + deadline),
    ]
    rows = [
        (d["id"], d["label"], d["steps_settled"], d["steps_void"], d["tensors"], d["elements"], d["codec"])
        for d in j["domains"]
    ]
    parts = [facts(pairs)]
    if rows:
        parts.append(table(("DOMAIN", "LABEL", "SETTLED", "VOID", "TENSORS", "ELEMENTS", "CODEC"), rows))
    parts += [_wait("the job", w) for w in j["waiting_for"]]
    parts += [_wait(f"domain {d['id']}", w) for d in j["domains"] for w in d["waiting_for"]]
    return "\n".join(parts)


def _wait(who: str, w: dict[str, Any]) -> str:
    step = f" in step {w['step']}" if w["step"] else ""
    return f"{who} waits {human_duration(w['since_seconds'])} for {clean(w['node'])}{step}: {clean(w['wanted'])}"


def tensors(answer: dict[str, Any]) -> str:
    rows = []
    for t in answer["tensors"]:
        shape = "x".join(map(str, t["shape"])) or "scalar"
        rows.append(
            (t["name"], t["domain"], t["dtype"], shape, t["codec"], human_size(t["bytes_raw"]),
             human_size(t["bytes_wire"]), ratio(t), residual(t))
        )  # fmt: skip
    if not rows:
        return "no tensors match"
    return table(("TENSOR", "DOMAIN", "DTYPE", "SHAPE", "CODEC", "RAW", "WIRE", "RATIO", "RESIDUAL"), rows)


def ratio(tensor: dict[str, Any]) -> str:
    return f"{tensor['bytes_raw'] / tensor['bytes_wire']:.3g}x" if tensor["bytes_wire"] else "-"


def residual(tensor: dict[str, Any]) -> str:
    return f"{tensor['residual_norm']:.4g}"
