"""The dashboard's files: all there, confined, nothing from elsewhere; the names under which they are served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gcserver.admin import pages

FILES = pages.load()
TEXTS = {path: answer.body.decode() for path, answer in FILES.items()}


def test_whatever_a_file_names_is_there_and_whatever_is_there_is_named() -> None:
    named = {pages.ROOT}
    for path, text in TEXTS.items():
        named |= set(re.findall(r'(?:href|src)="(/[^"#]*)"', text))
        if path.endswith(".js"):
            named |= {pages.PARTS + name for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named == FILES.keys()


def test_nothing_comes_from_elsewhere_and_nothing_is_made_of_text() -> None:
    for path, text in TEXTS.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    page = TEXTS[pages.ROOT]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_every_file_says_its_kind_and_is_confined() -> None:
    for path, answer in FILES.items():
        headers = dict(answer.headers)
        assert answer.status == 200 and answer.kind.partition(";")[0] in (
            "text/html", "text/css", "text/javascript", "image/svg+xml",
        ), path  # fmt: skip
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "*" not in policy
        assert {"frame-ancestors 'none'", "base-uri 'none'", "trusted-types 'none'"} <= set(policy.split("; "))
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")


def test_controls_have_labels_and_parts_have_headings() -> None:
    page = TEXTS[pages.ROOT]
    for control in re.findall(r'<(?:select|input) id="(\w+)"', page):
        assert f'<label for="{control}">' in page
    sections = re.findall(r'<section id="(\w+)"[^>]* aria-labelledby="([\w-]+)"', page)
    assert {name for name, _ in sections} == set(re.findall(r'<a href="#(\w+)">\w+</a>', page))
    assert all(f'<h2 id="{heading}">' in page for _, heading in sections)


OWN = "127.0.0.1:7461 10.0.0.1 [::1]:7461 [fe80::1] localhost:1 x.localhost node7:7461 A.Cluster:1 a.cluster.:7461"
OTHERS = (
    "evil.example evil.example:7461 a.cluster.evil.example:7461 127.0.0.1.evil.example evil.example.:80 :1 1.2.3.4.5"
)


@pytest.mark.parametrize("host", OWN.split())
def test_own_names(host: str) -> None:
    assert pages.is_own(host, frozenset({"a.cluster"}))


@pytest.mark.parametrize("host", ["", *OTHERS.split()])
def test_names_of_others(host: str) -> None:
    assert not pages.is_own(host, frozenset({"a.cluster"}))


def test_the_files_are_in_the_wheel() -> None:
    import tomllib

    root = Path(__file__).resolve().parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    globs = [g.removeprefix("page/") for g in data["gcserver.admin"]]
    folder = root / "gcserver" / "admin" / "page"
    assert {p.name for g in globs for p in folder.glob(g)} == {p.name for p in folder.iterdir()}
