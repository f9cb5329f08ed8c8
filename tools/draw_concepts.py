"""Draws the pictures of docs/concepts.md, as SVG files in docs/images.

What may live here: shapes and where they stand. What may not: what the pictures explain (docs/concepts.md says
it again in words, for those who do not see them).

Each file brings its own background and takes the reader's light or dark setting, so it is legible on any page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape

from tools import generated

IMAGES = generated.ROOT / "docs" / "images"
STYLE = """\
text{font:14px system-ui,sans-serif;fill:#1c2430}
.small{font-size:12px;fill:#4a5565}.head{font-weight:600}.mid{text-anchor:middle}
.back{fill:#fbfcfe;stroke:#c9d1dc}.box{fill:#e6ecf5;stroke:#5b6b82}.group{fill:none;stroke:#8a97a8;stroke-dasharray:5 4}
.a{fill:#cfe3ff;stroke:#2f6db5}.b{fill:#d3f0d6;stroke:#2f8a3e}.c{fill:#ffe3c2;stroke:#b5701f}
.line{stroke:#3c4a5e;stroke-width:1.6;fill:none}.thin{stroke:#8a97a8;fill:none}.tip{fill:#3c4a5e}
@media (prefers-color-scheme:dark){text{fill:#e8edf4}.small{fill:#b4bfcd}
.back{fill:#171c24;stroke:#3a4554}.box{fill:#2a3442;stroke:#8fa0b7}.group{stroke:#6b7a8d}
.a{fill:#1d3d66;stroke:#7fb2f0}.b{fill:#1e4a28;stroke:#7fcf8d}.c{fill:#5a3a14;stroke:#f0b878}
.line{stroke:#c3cedc}.thin{stroke:#6b7a8d}.tip{fill:#c3cedc}}"""


class Picture:
    """One drawing, ``width`` x ``height`` pixels at its natural size; grows by calls, `svg()` is the file."""

    def __init__(self, title: str, about: str, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="t d"><title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(about)}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Lines are separated by newlines, 17 pixels apart."""
        for i, line in enumerate(words.split("\n")):
            self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y + 17 * i:g}">{escape(line)}</text>')

    def box(self, x: float, y: float, w: float, h: float, words: str = "", kind: str = "box", text: str = "") -> None:
        """A rectangle with lines of text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5"/>')
        if words:
            lines = words.count("\n")
            self.text(x + w / 2, y + h / 2 + 5 - 8.5 * lines, words, f"mid {text}".strip())

    def arrow(self, *points: tuple[float, float]) -> None:
        """Through all points, with a tip at the last."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}" marker-end="url(#tip)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line class="thin" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def rounds() -> str:
    """One block's round, in both schemes."""
    p = Picture(
        "A round of one block in the schemes owner and all",
        "Left: nodes a and c send contributions to b, the block's owner, which sums and sends the average to "
        "both. Right: "
        "each of three nodes sends its contribution to the two others, and each sums for itself.",
        720, 322,
    )  # fmt: skip
    for left, name in ((0, "scheme owner: two trips"), (360, "scheme all: one trip")):
        p.text(left + 180, 28, name, "head mid")
        p.box(left + 30, 60, 84, 40, "node a", "a")
        p.box(left + 246, 60, 84, 40, "node c", "c")
        p.box(left + 138, 190, 84, 40, "node b", "b")
    p.arrow((60, 100), (146, 188))
    p.arrow((300, 100), (214, 188))
    p.arrow((166, 190), (92, 102))
    p.arrow((194, 190), (268, 102))
    p.text(20, 152, "contribution", "small")
    p.text(272, 152, "contribution", "small")
    p.text(180, 126, "average", "small mid")
    p.text(180, 252, "owns this block: adds the contributions in\nmember order, compresses the result", "small mid")
    p.line(360, 44, 360, 300)
    for x1, y1, x2, y2 in ((420, 100, 506, 188), (526, 190, 452, 102), (660, 100, 574, 188), (554, 190, 628, 102)):
        p.arrow((x1, y1), (x2, y2))
    p.arrow((474, 74), (606, 74))
    p.arrow((606, 88), (474, 88))
    p.text(540, 120, "contributions", "small mid")
    p.text(540, 252, "everyone adds all contributions in\nmember order: the same bytes everywhere", "small mid")
    p.text(180, 304, "other blocks have other owners", "small mid")
    p.text(540, 304, "nothing is compressed a second time", "small mid")
    return p.svg()


def step() -> str:
    """What happens to two blocks of one gradient, over time."""
    p = Picture(
        "The life of a step",
        "Time runs to the right. While the worker is still in its backward pass, blocks that are complete "
        "are copied into "
        "shared memory, encoded by the node's lane, sent to their owner, summed there, sent back, decoded "
        "and copied out. "
        "When all blocks are out on all nodes the step is settled.",
        720, 336,
    )  # fmt: skip
    rows = (("worker", 62), ("lane here", 122), ("network", 182), ("lane of the owner", 242))
    for name, y in rows:
        p.text(14, y + 22, name, "head" if name == "worker" else "")
        p.line(150, y + 40, 706, y + 40)
    p.box(156, 54, 122, 18, "backward pass", "box", "small")
    # where a block's parts begin, and how wide they are; the second block is a part behind
    parts = (
        ("in", 76, 22, 0, 49), ("encode", 130, 26, 56, 58), ("send", 190, 26, 125, 52), ("sum", 250, 26, 181, 58),
        ("back", 190, 26, 244, 52), ("decode", 130, 26, 300, 58), ("out", 76, 22, 370, 49),
    )  # fmt: skip
    for kind, shift, number in (("a", 168, 1), ("b", 229, 2)):
        for name, y, high, x, wide in parts:
            p.box(shift + x, y, wide, high, f"{name} {number}", kind, "small")
    p.box(656, 62, 50, 94, "settled:\nresid-\nuals\nflip", "c", "small")
    p.text(14, 28, "A step with two blocks, 1 and 2", "head")
    p.text(136, 312, "time", "small")
    p.arrow((170, 308), (700, 308))
    return p.svg()


def residuals() -> str:
    """The two versions of a residual."""
    p = Picture(
        "Two versions of every residual",
        "Encoding step t reads the gradient and the current version of the residual, and writes the payload "
        "and the other "
        "version. One store of eight bytes, when the step is settled, makes the other version current. A "
        "process killed "
        "before that store, or a void step, leaves the old one.",
        720, 300,
    )  # fmt: skip
    p.text(14, 28, "Step t", "head")
    p.box(30, 52, 150, 44, "gradient of step t")
    p.box(30, 150, 150, 44, "residual, version 0\n(current)", "a")
    p.box(268, 96, 118, 56, "encode")
    p.box(476, 52, 214, 44, "payload: to the owner")
    p.box(476, 150, 214, 44, "residual, version 1\n(what the payload leaves out)", "b")
    p.arrow((180, 74), (224, 74), (224, 112), (266, 112))
    p.arrow((180, 172), (224, 172), (224, 136), (266, 136))
    p.arrow((386, 112), (430, 112), (430, 74), (474, 74))
    p.arrow((386, 136), (430, 136), (430, 172), (474, 172))
    p.line(14, 214, 706, 214)
    p.text(30, 238, "settled:")
    p.text(150, 238, "one 8-byte store makes version 1 current; step t + 1 reads it and writes version 0", "small")
    p.text(30, 260, "void:")
    p.text(150, 260, "nothing is stored: version 0 stays current, as if the step had not been", "small")
    p.text(30, 282, "killed before:")
    p.text(150, 282, "version 0 is current still; encoding again gives the same bytes", "small")
    return p.svg()


def names() -> str:
    """Job, epoch, domain, block, lane."""
    p = Picture(
        "Job, epochs, domains, blocks and lanes",
        "A job has epochs: spans of steps with one membership. It has domains, which settle steps of their "
        "own; a domain's "
        "tensors lie in one address space, cut into blocks; each block has an owner node, and a lane on every node.",
        720, 372,
    )  # fmt: skip
    p.box(14, 14, 692, 344, "", "group")
    p.text(28, 38, "job gpt: ranks 0 to 5 on the nodes a, b, c", "head")
    p.box(28, 54, 330, 34, "epoch 1: members a, b, c, steps 1 to 41")
    p.box(362, 54, 330, 34, "epoch 2: members a, b, steps 42 and on")
    p.text(28, 118, "domain ddp.0: a DDP model; one backward pass is one step", "head")
    blocks = (("a", "a"), ("b", "b"), ("c", "c"), ("a", "a"), ("b", "b"), ("c", "c"))
    for i, (kind, owner) in enumerate(blocks):
        x = 28 + 111 * i
        p.box(x, 150, 107, 44, f"block {i}\nowner {owner}", kind)
        p.arrow((x + 53, 194), (x + 53, 226))
        p.box(x, 228, 107, 30, f"lane {i % 2}")
    p.text(28, 142, "address space: all tensors in the order in which gradients get ready", "small")
    p.text(28, 278, "lane i of a node: one process with a core; talks to lane i of the other nodes only", "small")
    p.box(28, 294, 330, 50, "domain calls: named tensors;\none call is one step")
    p.box(362, 294, 330, 50, "domain exact: broadcasts and\nunnamed tensors, never compressed")
    return p.svg()


def favicon() -> str:
    """Three nodes that share one average."""
    shapes = "".join(
        f'<line x1="16" y1="16" x2="{x}" y2="{y}" stroke="#3f51b5" stroke-width="3"/><circle cx="{x}" cy="{y}" r="5" '
        'fill="#3f51b5"/>'
        for x, y in ((6, 8), (26, 8), (16, 27))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{shapes}<circle cx="16" cy="16" r="6"/></svg>\n'
    )


PICTURES: dict[str, Callable[[], str]] = {
    "round.svg": rounds,
    "step.svg": step,
    "residuals.svg": residuals,
    "names.svg": names,
    "favicon.svg": favicon,
}


def main(argv: list[str] | None = None) -> int:
    return generated.keep({IMAGES / name: draw() for name, draw in PICTURES.items()}, "pictures", argv)


if __name__ == "__main__":
    sys.exit(main())
