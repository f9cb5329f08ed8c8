"""What an audit is asked for, and the arithmetic of what it finds, against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gcclient import Audit
from gcclient.audit import Sums, finding, read_audit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("every=7", Audit(7)),
        (" every = 50 , limit = 0.5 , action = dense ", Audit(50, 0.5, "dense")),
        ("limit=2", Audit(100, 2.0, "warn")),
        ("every=20,window=5", Audit(20, window=5)),
        ("action=warn", Audit()),
    ],
)
def test_the_variable_says_what_the_argument_would(text: str, expected: Audit) -> None:
    assert read_audit(None, {"GC_AUDIT": text}) == expected
    assert read_audit(Audit(3), {"GC_AUDIT": text}) == Audit(3), "the argument comes first"


def test_without_either_there_is_none() -> None:
    assert read_audit(None, {}) is read_audit(None, {"GC_AUDIT": " "}) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("100", "'100' is none of its parts"),
        ("every=100,every=3", "'every=3' is none of its parts, or there twice"),
        ("evry=100", "'evry=100'"),
        ("every=often", "every=often is no number"),
        ("every=0", "every=0: expected a number of steps, 1.."),
        ("window=101", "window=101: expected a number of steps, 1..100 (what every says)"),
        ("limit=nan", "limit=nan: expected a relative error"),
        ("limit=-1", "limit=-1.0: expected a relative error"),
        ("action=stop", "action='stop': expected one of warn, dense"),
        ("action=dense", 'action="dense" needs a limit'),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused(text: str, part: str) -> None:
    with pytest.raises(
        ValueError, match=r"^GC_AUDIT=.*; expected any of every=STEPS,limit=ERROR,action=warn\|dense"
    ) as caught:
        read_audit(None, {"GC_AUDIT": text})
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 1 << 40}, ValueError, "every=1099511627776"),
        ({"every": 2.5}, TypeError, "every=2.5: expected a whole number"),
        ({"every": True}, TypeError, "every=True"),
        ({"every": 5, "window": 0}, ValueError, "window=0"),
        ({"window": "2"}, TypeError, "window='2'"),
        ({"limit": "0.5"}, TypeError, "limit='0.5': expected a number or None"),
        ({"limit": math.inf}, ValueError, "limit=inf"),
        ({"limit": 1, "action": "stop"}, ValueError, "action='stop'"),
        ({"action": "dense"}, ValueError, "needs a limit"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], kind: type[Exception], part: str) -> None:
    with pytest.raises(kind) as caught:
        Audit(**options)
    assert part in str(caught.value)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    audit = Audit(np.int64(5), np.float32(0.5))  # type: ignore[arg-type]
    assert (audit, type(audit.every), type(audit.limit)) == (Audit(5, 0.5), int, float)


def test_something_else_is_no_audit() -> None:
    with pytest.raises(TypeError, match=r"audit=100: expected a gcclient\.Audit or None, got a int"):
        read_audit(100, {})


def test_pieces_add_up_to_what_numpy_says_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    exact, delivered = rng.normal(size=(2, 1000))
    sums = Sums()
    for lo in range(0, 1000, 300):
        sums.add(delivered[lo : lo + 300], exact[lo : lo + 300])
    norm = np.linalg.norm
    assert sums.error() == pytest.approx(norm(delivered - exact) / norm(exact))
    assert sums.cosine() == pytest.approx(delivered @ exact / norm(delivered) / norm(exact))
    assert sums.ratio() == pytest.approx(norm(delivered) / norm(exact))


@pytest.mark.parametrize(
    ("delivered", "exact", "expected"),
    [
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, 1.0)),
        ([1.0, 0.0], [0.0, 0.0], (math.inf, 0.0, math.inf)),
        ([0.0, 0.0], [0.0, 2.0], (1.0, 0.0, 0.0)),
        ([3.0, 4.0], [3.0, 4.0], (0.0, 1.0, 1.0)),
        ([-3.0, -4.0], [3.0, 4.0], (2.0, -1.0, 1.0)),
        ([1e-170, 0.0], [1e-170, 0.0], (0.0, 1.0, 1.0)),
    ],
)
def test_zeros_and_extremes(delivered: list[float], exact: list[float], expected: tuple[float, ...]) -> None:
    sums = Sums()
    sums.add(np.array(delivered), np.array(exact))
    assert (sums.error(), sums.cosine(), sums.ratio()) == pytest.approx(expected)


def test_a_finding_names_the_worst_first_and_weighs_all_elements_alike() -> None:
    tensors = {}
    for i in range(12):
        tensors[f"t{i}"] = Sums()
        tensors[f"t{i}"].add(np.array([1.0 + i / 10]), np.array([1.0]))
    found = finding("ddp.0", tensors)
    assert found is not None and found.whole.name == "ddp.0"
    assert [t.name for t in found.worst] == [f"t{i}" for i in range(11, 3, -1)]
    assert [t.error for t in found.worst[:2]] == pytest.approx([1.1, 1.0])
    assert found.whole.error == pytest.approx(math.sqrt(sum((i / 10) ** 2 for i in range(12)) / 12))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_no_finding(bad: float) -> None:
    tensors = {"good": Sums(), "bad": Sums()}
    tensors["good"].add(np.ones(3), np.ones(3))
    with np.errstate(invalid="ignore"):
        tensors["bad"].add(np.array([bad]), np.array([bad]))
    assert finding("ddp.0", tensors) is None
