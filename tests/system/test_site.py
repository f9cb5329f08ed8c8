"""The site's own script in a real browser.

What may live here: what the site adds to its theme. What may not: pages (`tests/unit/test_docs.py`), the theme, the
build (`make docs`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.daemon import ROOT
from tests.system import chromium

pytestmark = [pytest.mark.system, chromium.needs_chromium]
PAGE = """<!doctype html><title>a page</title><script src="iframe-worker.js"></script><p id="said"></p><script>
const worker = new Worker("twice.js")
worker.addEventListener("message", event => { said.textContent += event.data.number + " " })
worker.postMessage({number: 21})
worker.postMessage({number: 4})
</script>"""


def test_the_search_has_its_worker_on_a_page_from_the_disk(tmp_path: Path) -> None:
    """Browsers start none from file://."""
    shutil.copy(ROOT / "docs" / "javascripts" / "iframe-worker.js", tmp_path)
    (tmp_path / "twice.js").write_text(
        'addEventListener("message", event => postMessage({number: 2 * event.data.number}))'
    )
    (tmp_path / "page.html").write_text(PAGE)
    asked: list[str] = []
    with chromium.browser() as browser, chromium.page(browser, 800) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("document.getElementById('said').textContent === '42 8 '")
    assert [url for url in asked if not url.startswith("file:")] == []
