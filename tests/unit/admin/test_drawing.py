"""Timelines as a page, a picture and a trace; what is said where nothing can be drawn."""

from __future__ import annotations

import asyncio
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin import convert, drawing
from tests.unit.admin.source import FixedSource


def answer(timeline: bool = True) -> dict[str, Any]:
    return convert.plain(convert.plan(asyncio.run(FixedSource().plan("", timeline))))


def test_a_trace_has_a_process_a_side_and_a_thread_a_resource(tmp_path: Path) -> None:
    drawing.draw(answer(), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "world predicted", 2: "world measured"}
    boxes = [(e["pid"], e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"]
    assert boxes == [
        (1, "compute", 0, 200_000), (1, "wte.weight", 100_000, 50_000), (1, "wte.weight", 150_000, 100_000),
        (2, "compute", 0, 200_000), (2, "wte.weight", 100_000, 50_000),
    ]  # fmt: skip


def test_a_page_shows_both_sides_on_one_scale(tmp_path: Path) -> None:
    drawing.draw(answer(), tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    pictures = [
        ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]
    ]
    widths = [[float(r.attrib["width"]) for r in p.iter("rect")] for p in pictures]
    assert "world, predicted: 250.0 ms" in page and "world, measured: 200.0 ms" in page
    times = [[t.text for t in p.iter("text") if t.attrib.get("text-anchor")] for p in pictures]
    assert times[0] == times[1] == ["0", "50", "100", "150", "200", "250"]
    assert [len(w) for w in widths] == [3, 2] and widths[0][0] == widths[1][0] == pytest.approx(4 * widths[0][1])


def test_a_page_without_a_measured_step_says_so(tmp_path: Path) -> None:
    predicted = answer()
    predicted["domains"][0]["measured"] = []
    predicted["domains"].append({**predicted["domains"][0], "label": "calls", "predicted": []})
    drawing.draw(predicted, tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert "world: no step ended while it was waited for." in page and "calls" not in page, "what is not traced"


def test_a_prediction_of_what_was_only_proposed_says_so(tmp_path: Path) -> None:
    proposed = answer()
    proposed["domains"][0]["forecast"]["plan_version"] = 0
    drawing.draw(proposed, tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert "world, only proposed, predicted: 250.0 ms" in page and "world, measured: " in page


def test_names_of_tensors_are_escaped(tmp_path: Path) -> None:
    hostile = answer()
    hostile["domains"][0]["predicted"][0]["what"] = "<script>"
    drawing.draw(hostile, tmp_path / "t.html")
    assert "<script>" not in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize("form", drawing.FORMS)
def test_what_no_daemon_says_is_left_out_and_names_are_no_formulas(tmp_path: Path, form: str) -> None:
    hostile = answer()
    predicted = hostile["domains"][0]["predicted"]
    predicted[0]["what"], predicted[0]["resource"] = "w\u00e9", "worker $\\frac$ \x1b[2J"
    hostile["job"] = "$\\frac$"
    bad = [{**predicted[0], "end_seconds": end} for end in (math.inf, math.nan, 1e308, -1.0, -math.inf)]
    hostile["domains"].append({**hostile["domains"][0], "predicted": bad, "measured": bad[:1]})
    path = tmp_path / f"t{form}"
    drawing.draw(hostile, path)
    if form == ".json":
        lengths = [e["dur"] for e in json.loads(path.read_text("utf-8"))["traceEvents"] if e["ph"] == "X"]
        assert len(lengths) == 5 and max(lengths) < 1e6
    elif form == ".html":
        assert path.read_text("utf-8").count("<rect") == 5
    for job in [*predicted, *hostile["domains"][0]["measured"]]:
        job["end_seconds"] = job["start_seconds"] = 0.0
    drawing.draw(hostile, path)
    with pytest.raises(drawing.DrawingError, match="no step was predicted, and none ended"):
        drawing.draw({**hostile, "domains": hostile["domains"][-1:]}, path)


def test_more_rows_than_a_picture_holds(tmp_path: Path) -> None:
    many = answer()
    first = many["domains"][0]["predicted"][0]
    many["domains"][0]["predicted"] = [{**first, "resource": f"lane {i}"} for i in range(1001)]
    drawing.draw(many, tmp_path / "t.html")
    with pytest.raises(drawing.DrawingError, match=r"rows are too many for a \.png"):
        drawing.draw(many, tmp_path / "t.png")


def test_a_picture_is_one(tmp_path: Path) -> None:
    drawing.draw(answer(), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_timeline_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(drawing.DrawingError, match="set-plan --mode auto"):
        drawing.draw(answer(timeline=False), tmp_path / "t.json")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(drawing.DrawingError, match=r"none/t\.json cannot be written"):
        drawing.draw(answer(), tmp_path / "none" / "t.json")


def test_every_resource_of_a_timeline_has_a_colour_and_lanes_share_theirs() -> None:
    kinds = ["worker", "lane", "out", "in", "push", "exchange"]
    colours = [drawing.colour(kind) for kind in kinds]
    assert len({*colours, drawing.colour("something else")}) == len(kinds) + 1
    assert drawing.colour("lane 1") == drawing.colour("lane 0") == drawing.colour("lane")
