"""No kernel uses the address of an array that numba has freed: read off the sources.

numba frees an array after the last line that names it, whoever still has its address (`jit.place`). Whether that shows
depends on the allocator, so it is not left to chance: for every array made in a compiled function, each use of an
address taken from it must be followed by a mention of the array (`jit.hold` is one), or lie in a loop that has one and
begins after the array was made.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gcserver import codecs

FILES = sorted(Path(codecs.__file__).parent.glob("*.py"))
MAKES = {"empty", "zeros", "ones", "array", "empty_like", "zeros_like", "full", "arange"}
VIEWS = {"place", "int64", *(f"{kind}{bits}" for kind in "iuf" for bits in (8, 16, 32, 64))}


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def compiled(function: ast.FunctionDef) -> bool:
    names = {called(d) or getattr(d, "id", "") for d in function.decorator_list}
    return bool(names & {"njit", "kernel"})


def pairs(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    """(name, value) of an assignment, a tuple's item by item."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        items = zip(target.elts, value.elts, strict=True)
        return [(t.id, v) for t, v in items if isinstance(t, ast.Name)]
    return [(target.id, value)] if isinstance(target, ast.Name) else []


def is_address(node: ast.expr, known: set[str], array: str) -> bool:
    """Whether the value is the array's address, one computed from it, or a view of memory there."""
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.Call) and called(node) in VIEWS and node.args:
        first = node.args[0]
        if called(node) == "place":
            return isinstance(first, ast.Name) and first.id == array
        return is_address(first, known, array)
    if isinstance(node, ast.BinOp):
        return is_address(node.left, known, array) or is_address(node.right, known, array)
    if isinstance(node, ast.IfExp):
        return is_address(node.body, known, array) or is_address(node.orelse, known, array)
    if isinstance(node, ast.Tuple):
        return any(is_address(item, known, array) for item in node.elts)
    return False


def loops_with(function: ast.FunctionDef, line: int) -> list[tuple[int, int]]:
    found = (n for n in ast.walk(function) if isinstance(n, ast.For | ast.While))
    return [(n.lineno, n.end_lineno or 0) for n in found if n.lineno <= line <= (n.end_lineno or 0)]


def freed_too_early(function: ast.FunctionDef) -> list[str]:
    """Uses of an address after the last mention of its array, as text."""
    made: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.stmt):
            made |= {name: node.lineno for name, value in pairs(node) if called(value) in MAKES}
    faults = []
    for array, line in made.items():
        known: set[str] = set()
        while True:
            more = {
                name
                for node in ast.walk(function)
                if isinstance(node, ast.stmt)
                for name, value in pairs(node)
                if is_address(value, known, array)
            }
            if more <= known:
                break
            known |= more
        placed = {id(n.args[0]) for n in ast.walk(function) if called(n) == "place" and isinstance(n, ast.Call)}
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        mentions = [node.lineno for node in names if node.id == array]
        # To take the address is a mention, but it is used afterwards, by what it is handed to.
        after = [node.lineno for node in names if node.id == array and id(node) not in placed]
        uses = [node.lineno for node in names if node.id in known or (id(node) in placed and node.id == array)]
        for use in uses:
            # In a loop that may come round again nothing is freed that it names.
            looped = (
                start > line and any(start <= m <= end for m in mentions) for start, end in loops_with(function, use)
            )
            if not any(mention >= use for mention in after) and not any(looped):
                faults.append(f"{function.name}: {array} may be freed before its address is used in line {use}")
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_arrays_outlive_their_addresses(path: Path) -> None:
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and compiled(n)]
    assert [fault for function in functions for fault in freed_too_early(function)] == []


def function(text: str) -> ast.FunctionDef:
    (found,) = ast.parse(text).body
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("a = np.empty(4)\n    use(place(a))", True),
        ("a = np.empty(4)\n    use(place(a))\n    hold(a)", False),
        ("a = np.empty(4)\n    use(place(a), a)", False),
        ("a, b = np.empty(4), np.empty(4)\n    p, q = place(a), place(b)\n    use(p)\n    hold(a)\n    use(q)", True),
        (
            "a = np.empty(4)\n    q = place(a) + 4 if n else 0\n    hold(a)\n    v = u32(q, 1)\n    use(v[0])",
            True,
        ),
        ("a = np.empty(4)\n    p = place(a)\n    for i in range(n):\n        use(p)\n        a[i] = 0", False),
        ("for i in range(n):\n        a = np.empty(4)\n        p = place(a)\n        a[0] = 1\n        use(p)", True),
    ],
)
def test_the_check_sees_what_it_should(body: str, fault: bool) -> None:
    assert bool(freed_too_early(function(f"def f(n):\n    {body}"))) is fault
