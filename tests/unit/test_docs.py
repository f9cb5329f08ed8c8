"""The pages as a whole: all in the navigation, every link and anchor leads somewhere, what is generated is current.

What may live here: what can be known without building the site (`make docs` does that, strictly). What may not: whether
single pages are true of what they describe, beyond commands and figures (`client/test_error_docs.py`, others).
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcserver import cli, gcrun
from gcserver.admin import gcctl
from tools import draw_concepts, gen_commands_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: pages of the root that the site has under project/
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in PROJECT), ROOT / "README.md"]
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LIST = re.compile(r"([-*]|\d+\.) ")


def prose(path: Path) -> str:
    """A page without blocks of code."""
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; the site is told to do the same. What two headings have
    is none: GitHub and the site number the second one differently."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return {slug for slug, times in found.items() if times == 1}


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from named(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    there = sorted(named(SITE["nav"]))
    pages = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
    assert there == sorted([*pages, *(f"project/{name}" for name in PROJECT)])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    own = anchors(page)
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: there is no such file"
        assert file.is_relative_to(ROOT), f"{target} leads out of the tree"
        if anchor:
            assert file.suffix == ".md", f"{target}: an anchor of something that is no page"
            assert anchor in (own if file == page else anchors(file)), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lists_are_lists_everywhere(page: Path) -> None:
    """GitHub begins a list right below a paragraph; the site takes that for more of the paragraph."""
    before = ""
    for line in prose(page).splitlines():
        if LIST.match(line) and before and not before.startswith((" ", "#", "<")):
            assert LIST.match(before), f"a blank line is missing before {line!r}"
        before = line


def test_pictures_say_what_they_show_and_can_be_read_in_the_dark() -> None:
    for page in PAGES:
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", prose(page)):
            assert len(alt) > 40, f"{page.name}: {target} needs a text for those who do not see it"
    for name in draw_concepts.PICTURES:
        picture = (DOCS / "images" / name).read_text()
        assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
        if name != "favicon.svg":
            assert "prefers-color-scheme:dark" in picture and "<title" in picture and "<desc" in picture
            assert f"images/{name}" in (DOCS / "concepts.md").read_text()


def test_the_site_needs_no_other_host() -> None:
    assert SITE["theme"]["font"] is False
    assert "offline" in SITE["plugins"] and SITE["use_directory_urls"] is False
    assert "extra_javascript" not in SITE and "repo_url" not in SITE
    # by its name the plugin "offline" knows that it need not fetch its own
    assert SITE["extra"]["polyfills"] == ["javascripts/iframe-worker.js"]
    assert (DOCS / "javascripts" / "iframe-worker.js").exists()
    assert not [css for css in SITE["extra_css"] if not (DOCS / css).exists()]
    assert SITE["strict"] is True and SITE["validation"]["links"]["anchors"] == "warn"


def test_what_is_generated_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_commands_page.main(["--check"]) == 0, "run `make commands`"
    assert draw_concepts.main(["--check"]) == 0, "run `make pictures`"
    assert capsys.readouterr().out == ""


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    shown = re.findall(r"^::: gcclient\.(\w+)$", page, re.MULTILINE)
    told = re.findall(r"`(\w+_inplace)`", page)  # other names of functions that are shown
    (public,) = (
        [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
        for node in ast.parse((ROOT / "gcclient" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    )
    assert sorted([*shown, *told]) == sorted(public)


def test_figures_of_what_hurts_are_those_of_the_benchmarks() -> None:
    """Every figure with a decimal point or in milliseconds; the rest are counts, and factors of these."""
    source = "".join((DOCS / name).read_text() for name in ("benchmarks.md", "training.md", "training-history.md"))
    page = (DOCS / "compression-hurts.md").read_text()
    figures = set(re.findall(r"\d+\.\d+|\b\d+ ms", FENCE.sub("", page)))
    assert len(figures) > 40
    assert {f for f in figures if f not in source} == set()
    assert set(re.findall(r"2026-\d\d-\d\d", page)) <= set(re.findall(r"2026-\d\d-\d\d", source))


#: what stands before a command of ours: a prompt, variables, a folder, what runs it elsewhere, a loop of the shell
BEFORE = re.compile(
    r"^(\$ |[A-Z_]+=\S+ |/opt/gradcomm/bin/|smc_run |docker exec \S+ |kubectl [^#]* -- |source <\(| *do (?=gc))+"
)
#: two machines side by side
BESIDE = re.compile(r"^(gc\w+ .*?)( {3,})(?=gc)", re.MULTILINE)


def blocks_of(page: Path) -> Iterator[str]:
    """Blocks of commands; of one with two machines side by side, that of each."""
    for language, block in re.findall(r"^ *```(\w*).*?\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language not in ("", "sh"):
            continue
        if (two := BESIDE.search(block)) is None:
            yield block
        else:
            lines, at = block.splitlines(), len(two[1]) + len(two[2])
            yield "\n".join(line[:at].rstrip() for line in lines)
            yield "\n".join(line[at:].rstrip() for line in lines)


def commands_of(page: Path) -> list[list[str]]:
    """What a page says to type of gradcomm's own commands and make's targets, in words; usages in general aside."""
    found = []
    for block in blocks_of(page):
        plain = re.sub(r"(^|\s)#.*$|\\\n", " ", block, flags=re.MULTILINE)
        for line in re.split(r"&&|[|;\n]| > ", plain):
            line = BEFORE.sub("", line.strip()).rstrip(" )" if "<(" in line else None)
            if re.match(r"(gcserver|gcctl|gcrun|make)\b", line) and not re.search(r"\[[A-Z-]|\{\w+,|[─►◄]", line):
                found.append([word for word in shlex.split(line) if word != "..."])
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if commands_of(p)], ids=lambda p: p.name)
def test_commands_are_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.json").write_text('[{"pattern": "*", "codec": "fp16"}]')
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(page):
        match words:
            case ["gcserver", *rest]:
                assert cli.parser().parse_known_args(rest)[1] == [], words
            case ["gcctl", *rest]:
                gcctl.parser().parse_args(["http://host/path" if word == "URL" else word for word in rest])
            case ["gcrun", *rest]:
                assert gcrun.parser().parse_known_args(rest)[1] == [], words
            case ["make", *rest]:
                assert {w for w in rest if "=" not in w} <= targets, words


def test_pages_with_commands_are_seen() -> None:
    found = {page.name: len(commands_of(page)) for page in PAGES}
    assert found["README.md"] > 8 and found["start.md"] > 10 and found["kubernetes.md"] > 3 and found["gcctl.md"] > 5
    assert ["gcserver", "keygen", "--name", "b"] in commands_of(ROOT / "README.md")


def test_ten_minutes_of_reading_lead_to_two_nodes() -> None:
    """From the top of README.md to a script that trains on both: at 230 words a minute, commands counted as words."""
    path = "docs/start.md"
    before, _, _ = (ROOT / "README.md").read_text().partition(path)
    assert len(f"{before} {(ROOT / path).read_text()}".split()) <= 2300
    assert len(before.split()) < 200, "the way there is what README.md begins with"


def imports_of(page: Path) -> list[tuple[str, str]]:
    """(module, name in it, or empty) of what Python on a page imports of gradcomm."""
    found = []
    for block in re.findall(r"^ *```python.*?\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.Import):
                found += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(str(node.module), alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] in ("gcclient", "gcserver", "gcproto")]


@pytest.mark.parametrize("page", [p for p in PAGES if imports_of(p)], ids=lambda p: p.name)
def test_what_python_on_a_page_imports_is_there(page: Path) -> None:
    for module, name in imports_of(page):
        found = importlib.import_module(module)
        assert not name or hasattr(found, name), f"{module} has no {name}"


def test_pages_with_python_are_seen() -> None:
    assert {"README.md", "client.md", "planner.md", "migrate.md"} <= {page.name for page in PAGES if imports_of(page)}
