"""Real text without a download: the Python standard library's own sources, a token a byte.

What may live here: finding and concatenating them, the split, and drawing batches. What may not: models.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SKIP = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
#: Newline, the printable ASCII characters, and one token for every other byte, which sources hardly have.
VOCABULARY = 97


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to train on and tokens held out, uint8 tensors of one dimension."""

    train: torch.Tensor
    val: torch.Tensor


def load(limit: int = 1 << 20, holdout: float = 0.05) -> Text:
    """At most ``limit`` bytes of ``*.py`` files, ordered by name, the last ``holdout`` of them for validation.

    Tests are left out, since half of them is tables. The same bytes on every machine with the same Python.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in _sources(root):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not size:
        raise FileNotFoundError(f"no *.py under {root}: the standard library's sources are needed as text")
    data = torch.frombuffer(bytearray(b"".join(parts)[:limit].translate(_tokens())), dtype=torch.uint8)
    cut = int(data.numel() * (1 - holdout))
    return Text(data[:cut], data[cut:])


def _sources(root: Path) -> Iterator[Path]:
    """The files of a folder by name, then those of its subfolders; what is skipped is not even listed."""
    entries = sorted(root.iterdir())
    yield from (p for p in entries if p.suffix == ".py" and p.is_file())
    for folder in entries:
        if folder.name not in SKIP and folder.is_dir():
            yield from _sources(folder)


def _tokens() -> bytes:
    """The token of each byte."""
    table = bytearray(256)  # 0: everything else
    table[ord("\n")] = 1
    for byte in range(32, 127):
        table[byte] = byte - 30
    return bytes(table)


def batch(data: torch.Tensor, sequences: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(inputs, targets), int64[sequences, length] each, at positions drawn from ``generator``; targets are one on."""
    starts = torch.randint(data.numel() - length - 1, (sequences,), generator=generator)
    rows = torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
