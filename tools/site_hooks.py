"""What mkdocs is told while it builds the site: pages link to files beside docs/, and the site has to have those too.

What may live here: files that linked pages are brought in from, and links to them. What may not: the text of pages.

A Markdown page of the repository's root becomes `project/NAME`, any other file a page under `source/` that shows it, a
folder a list of its files. On GitHub the same links lead to the files themselves.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: pages of the root that the navigation names
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: ](target#anchor), where the target is no address of the web
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where the site has a file of the repository; ``path`` is relative to its root."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"project/{path}" if path in PROJECT else f"source/{path}.md"


def rewritten(text: str, here: str) -> str:
    """``text`` of the file ``here`` with links as the site has them. Code is left alone."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        leads = posixpath.relpath(place(target), posixpath.dirname(place(here)) or ".")
        return f"]({leads}{match[2] or ''})"

    done, at = [], 0
    for fence in FENCE.finditer(text):
        done += [LINK.sub(link, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*done, LINK.sub(link, text[at:])])


def beside(text: str, here: str) -> Iterator[str]:
    """What a page links to outside docs/, relative to the root."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        if not target.startswith("docs/"):
            yield target


def shown(path: str) -> str:
    """A file that is no page, or a folder, as a page. Raises PluginError where there is none."""
    file = ROOT / path
    if path.startswith("..") or not file.exists():
        raise PluginError(f"a page links to {path}, which is not there")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if file.is_dir():
        return head + "\n".join(f"- `{name}`" for name in sorted(os.listdir(file)) if not name.startswith((".", "__")))
    language = {".py": "python", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml"}.get(file.suffix, "text")
    return f"{head}````{language}\n{file.read_text()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to."""
    queue = [(f.content_string, f"docs/{f.src_uri}") for f in files.documentation_pages()]
    queue += [((ROOT / name).read_text(), name) for name in PROJECT]
    for name in PROJECT:
        files.append(File.generated(config, place(name), content=rewritten((ROOT / name).read_text(), name)))
    known = set(PROJECT)
    for text, here in queue:
        for target in beside(text, here):
            if target not in known:
                known.add(target)
                not_named = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, place(target), content=shown(target), inclusion=not_named))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what lies beside docs/."""
    if page.file.generated_by is not None:
        return markdown
    return rewritten(markdown, f"docs/{page.file.src_uri}")
