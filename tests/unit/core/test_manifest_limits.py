"""What a section may not be: refused before anything is laid out or allocated.

What may live here: tests of `check_section` in `proto/manifest.py`. What may not: layouts.
"""

from __future__ import annotations

import pytest

from gcproto.manifest import MAX_NAME, ManifestError, Section, TensorSpec, check_section


@pytest.mark.parametrize(
    ("section", "part"),
    [
        (Section(-1, (TensorSpec("w", (4,), 0),)), "sections start at 0"),
        (Section(0, (TensorSpec("w", (2**40 + 1, 0), 0),)), "a dimension is at most"),
        (Section(0, (TensorSpec("w", (2**20, 2**21), 0),)), "at most 1099511627776 elements"),
        (Section(0, (TensorSpec("w", (2**40,), 0), TensorSpec("v", (1,), 0))), "got 1099511627777"),
        (Section(0, (TensorSpec("w" * (MAX_NAME + 1), (4,), 0),)), "at most 4096 characters, got 4097"),
    ],
)
def test_oversized_sections_are_refused(section: Section, part: str) -> None:
    with pytest.raises(ManifestError, match=part):
        check_section(section)


def test_the_largest_section_passes() -> None:
    check_section(Section(0, (TensorSpec("w" * MAX_NAME, (2**20, 2**20), 0),)))
