"""Docstrings as the site's pages read them: names that are marked in Sphinx's manner, as Markdown marks them.

What may live here: what mkdocstrings does with docstrings before they are Markdown. What may not: their text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


class Names(griffe.Extension):
    """``:class:`NoAdvice``` becomes ```NoAdvice```."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
