"""The dashboard in a real browser: over fixed answers, and over two daemons and a job that runs.

What may live here: what a person sees and can do. What may not: what the daemon sends (`tests/unit/admin`). Screenshots
are in `out/dashboard`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin import exposition
from gcserver.admin.dashboard import Dashboard
from gcserver.admin.metrics import Metrics
from gcserver.admin.source import JobStatus, TensorStatus
from tests.integration.cluster import Cluster
from tests.integration.daemon import ROOT
from tests.integration.operators import reachable, until
from tests.system import chromium
from tests.system.dashboard_workers import HOSTILE
from tests.unit.admin.source import JOB, TENSORS, FixedSource

pytestmark = [pytest.mark.system, chromium.needs_chromium]
PICTURES = ROOT / "out" / "dashboard"
SIZES = {"1280": (1280, False), "360": (360, False), "1280-dark": (1280, True), "360-dark": (360, True)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.browser() as started:
        yield started


class Answers(FixedSource):
    """A job and tensors whose names mean no good."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs_here: list[JobStatus] = [replace(JOB, label=HOSTILE)]

    async def tensors(self, job: str, domain: str, pattern: str) -> list[TensorStatus]:
        named = replace(TENSORS[0], name=HOSTILE, domain=f"</td>{HOSTILE}", residual_norm=3.0, gradient_norm=2.0)
        long = replace(TENSORS[1], name="module." * 40)
        return [named, long, TENSORS[1]]


@contextmanager
def over(source: FixedSource, closer_every: float = 0.1) -> Iterator[str]:
    """A dashboard of a loop of its own, and where it is."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    dashboard = Dashboard(source, every=0.1, closer_every=closer_every)
    server = run(exposition.serve(Metrics("0", "a", 1), "127.0.0.1", 0, lambda: "", dashboard=dashboard))
    try:
        yield f"http://{server.address}/"
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def lines(page: Any, table: str) -> list[list[str]]:
    """All rows in one look: the page may draw them anew between two."""
    read = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    found: list[list[str]] = page.locator(f"#{table} tbody tr").evaluate_all(read)
    return found


def cells(page: Any, table: str, row: int = 0) -> list[str]:
    return lines(page, table)[row]


def shows(page: Any, step: str) -> bool:
    """Whether the first job is at this step."""
    return [row[2] for row in lines(page, "jobs-t")[:1]] == [step]


def shown_as(page: Any, size: str) -> None:
    """At a size, and it can be read there."""
    width, dark = SIZES[size]
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if dark else "light")
    assert (chromium.overflow(page), chromium.too_faint(page)) == (0, []), size
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 150) == dark, back


def test_it_can_be_read_at_every_size_and_in_the_dark(browser: Any) -> None:
    with over(Answers()) as address, chromium.page(browser, 1280) as page:
        page.goto(address)
        page.wait_for_selector("#layers-t tbody tr")
        for size in SIZES:
            shown_as(page, size)


def test_names_are_text_and_the_page_cannot_be_made_to_run_anything(browser: Any) -> None:
    with over(Answers()) as address, chromium.page(browser, 1280, about="TrustedHTML") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("#layers-t tbody tr")
        assert cells(page, "jobs-t")[0] == HOSTILE and cells(page, "layers-t")[:2] == [HOSTILE, f"</td>{HOSTILE}"]
        assert page.locator("#job option").all_inner_texts() == [HOSTILE]
        assert page.locator("img").count() == 0
        assert asked and all(url.startswith(address) for url in asked), "nothing from elsewhere"
        attempt = "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } })()"
        assert page.evaluate(attempt) == "TypeError", "Trusted Types"


def test_everything_is_shown_and_reached_by_keyboard(browser: Any) -> None:
    source = Answers()
    with over(source) as address, chromium.page(browser, 1280) as page:
        page.goto(address)
        page.wait_for_selector("#layers-t tbody tr")
        assert page.locator("#node").inner_text() == "a, serving" and page.locator("#live").inner_text() == "live"
        assert cells(page, "links-t")[:2] == ["b (tcp://10.0.0.2:7470)", "up"]
        assert cells(page, "links-t", 1)[1] == "refused for 3 min: 2 lanes, not 1"
        assert cells(page, "jobs-t")[6] == "aggregate of b for 3.5 s (world, step 42)"
        assert page.locator("#map a").count() == 2
        drawn = page.locator("#step svg[role=img]").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
        assert any(text.startswith("Predicted step, 250 ms") for text in drawn)
        assert any(text.startswith("Measured step, 200 ms") for text in drawn)
        assert "expected 250 ms, measured 260 ms" in page.locator("#plan").inner_text()
        assert cells(page, "layers-t")[5:] == ["2×", "1.5×"]
        assert cells(page, "counts-t")[:2] == ["frames_corrupt", "2"]

        reached = chromium.reached_by_tab(page)
        assert reached[0] == "a Skip to the cluster" and {"button pause", "select job", "input filter"} <= set(reached)
        assert {f"button {name}" for name in ("Tensor", "Codec", "Size", "Ratio", "Error")} <= set(reached)
        parts = ("Cluster", "Links", "Jobs", "Step", "Layers", "Plan", "Faults")
        assert {f"a {name}" for name in parts} <= set(reached)
        assert any(name.startswith("a b: up") for name in reached)

        page.focus("#layers-t [data-sort=name]")
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
        first = cells(page, "layers-t")[0]
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
        assert cells(page, "layers-t")[0] != first and cells(page, "layers-t", 2)[0] == first
        page.focus("#filter")
        page.keyboard.type("LN.")
        assert cells(page, "layers-t")[0] == "ln.bias" and page.locator("#layers-t tbody tr").count() == 1

        page.focus("#pause")
        page.keyboard.press("Enter")
        source.jobs_here = [replace(JOB, step=4711)]
        with chromium.page(browser, 1280) as other:
            other.goto(address)
            until("another page to show it", lambda: shows(other, "4,711"))
        assert cells(page, "jobs-t")[2] == "41" and page.locator("#live").inner_text() == "paused"
        page.keyboard.press("Enter")
        until("the newest step", lambda: shows(page, "4,711"))
        source.jobs_here = []
        page.wait_for_selector("#jobs-none", state="visible")
        assert page.locator("#changes li").first.inner_text().endswith("has left")


def test_what_cannot_be_looked_at_is_said_until_it_can_be(browser: Any) -> None:
    class Defective(Answers):
        defective = True

        async def tensors(self, job: str, domain: str, pattern: str) -> list[TensorStatus]:
            if self.defective:
                raise ZeroDivisionError("of all things")
            return await super().tensors(job, domain, pattern)

    source = Defective()
    with over(source, closer_every=3600.0) as address, chromium.page(browser, 1280) as page:
        page.goto(address)
        page.locator("#trouble", has_text="could not look at its details: ZeroDivisionError").wait_for()
        source.jobs_here = [replace(JOB, step=4711)]
        until("another look at jobs", lambda: shows(page, "4,711"))
        assert page.locator("#trouble").is_visible(), "that went well, and changes nothing about the other"
        source.defective = False
        source.jobs_here = [replace(JOB, plan_version=JOB.plan_version + 1)]
        page.wait_for_selector("#layers-t tbody tr")
        page.wait_for_selector("#trouble", state="hidden")


@pytest.mark.slow
def test_two_daemons_and_a_job(browser: Any, tmp_path: Path) -> None:
    options = {"codec.default": "topk(ratio=0.01)", "min_compress_bytes": "0"}
    PICTURES.mkdir(parents=True, exist_ok=True)
    with reachable(Cluster(tmp_path, nodes=2, options=options), metrics=True) as cluster:
        a, b = cluster.daemons
        job = cluster.start("tests.system.dashboard_workers:train", [0, 1], job="gpt", stop=f"{tmp_path}/stop")
        with chromium.page(browser, 1280) as page:
            page.goto(f"http://{a.options['node.metrics']}/")
            page.wait_for_selector("#live[data-state=good]")
            job.wait_mark("step 20")
            page.wait_for_selector("#step .part")
            until("a link and a job", lambda: lines(page, "links-t") and lines(page, "jobs-t"))
            assert cells(page, "links-t")[0].startswith(b.name) and cells(page, "links-t")[1] == "up"
            until("something to be sent", lambda: not cells(page, "links-t")[2].startswith(("0 B", "–")))
            assert cells(page, "jobs-t")[:2] == ["gpt", "running"]
            assert f"{b.name} (1)" in cells(page, "jobs-t")[5]
            names = [text.split()[0] for text in page.locator("#step .part span:first-child").all_inner_texts()]
            assert {"compute", "encode", "exchange", "decode"} <= set(names)

            def layers_shown() -> dict[str, list[str]]:
                """The rows by name; none until the daemon has answered what a job looks like from nearer by."""
                return {row[0]: row for row in lines(page, "layers-t")}

            until("a step's layers", lambda: "–" not in layers_shown().get("0.weight", ["–"]))
            layers = layers_shown()
            assert HOSTILE in layers
            weight = layers["0.weight"]
            assert weight[2] == "topk(ratio=0.01)+ef" and weight[3] == "256 KiB"
            assert float(weight[5].rstrip("×")) > 20, "compressed"
            assert float(weight[6].rstrip("×")) > 0.5, "most of a gradient is held back"

            step = cells(page, "jobs-t")[2]
            until("a step", lambda: cells(page, "jobs-t")[2] != step)
            for size in SIZES:
                shown_as(page, size)
                page.screenshot(path=PICTURES / f"{size}.png", full_page=True)

        b.kill_lane()
        with chromium.page(browser, 1280, about="net::ERR") as page:
            page.goto(f"http://{b.options['node.metrics']}/")
            page.locator("#facts", has_text="1 restarts").wait_for()
            (tmp_path / "stop").touch()
            first, second = (outcome.ok() for outcome in job.wait())
            assert first == second > 20
            b.kill()
            page.wait_for_selector("#live[data-state=bad]")
        assert all((PICTURES / f"{size}.png").stat().st_size > 20_000 for size in SIZES)
