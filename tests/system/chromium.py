"""A real browser for tests: Debian's Chromium, driven by Playwright.

What may live here: starting it, and what is asked of any page (contrast, overflow, what the keyboard reaches). What may
not: pages of ours.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

EXECUTABLE = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed (Debian: chromium)")
#: text that is not hidden and its contrast with what lies behind it, where that is too low (WCAG 2.1, 1.4.3)
_CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.tagName === "TITLE" || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const text = parse(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [bright, dark] = [light(text), light(behind(e))].sort((x, y) => y - x);
    const ratio = (bright + 0.05) / (dark + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName} ${e.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
#: what has the focus, and whether that shows
_FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e);
  const name = e.tagName.toLowerCase() + " " + (e.id || e.getAttribute("aria-label") || e.textContent.trim());
  return [name, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
}"""


@contextmanager
def browser() -> Iterator[Browser]:
    """Headless, without asking anybody but who it is told to."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=EXECUTABLE,
            args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
            timeout=90_000,
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def page(started: Browser, width: int, about: str = "") -> Iterator[Page]:
    """A page of a context of its own. What it complains of in its console, and dialogs that it opens, are errors, but
    for complaints ``about`` something."""
    context = started.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(60_000)
    complaints: list[str] = []
    opened = context.new_page()
    opened.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda e: complaints.append(str(e)))
    opened.on("dialog", lambda d: complaints.append(f"a dialog: {d.message}"))
    try:
        yield opened
        assert [c for c in complaints if not about or about not in c] == []
    finally:
        context.close()


def too_faint(opened: Page) -> list[str]:
    """Texts with less contrast than 4.5 to 1."""
    found: list[str] = opened.evaluate(_CONTRAST)
    return found


def overflow(opened: Page) -> int:
    """By how many pixels the page is wider than the window."""
    wider: int = opened.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider


def reached_by_tab(opened: Page, most: int = 80) -> list[str]:
    """What Tab leads to, from the top until it is back: names of elements with their ids or texts. Each of them has to
    show that it has the focus."""
    found: list[str] = []
    for _ in range(most):
        opened.keyboard.press("Tab")
        name, shown = opened.evaluate(_FOCUSED)
        if name.startswith("body") or name in found[:1]:
            break
        assert shown, f"{name} does not show that it has the focus"
        found.append(name)
    return found
