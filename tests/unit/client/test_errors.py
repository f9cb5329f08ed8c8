"""A daemon's Fault becomes a typed exception that says what to do."""

from __future__ import annotations

import pickle

import pytest

import gcclient
from gcclient import errors
from gcproto.messages import Fault


def test_every_fault_kind_has_its_class_and_its_facts() -> None:
    fault = Fault(
        b"j", "PeerLost", "b is gone", domain=3, step=7, epoch=1, phase="exchange", missing=("b",), elapsed=31.5,
        last_step=6, advice="look at b",
    )  # fmt: skip
    error = errors.from_fault(fault, "train")
    assert type(error) is gcclient.PeerLost
    assert (error.job, error.domain, error.step, error.epoch, error.phase) == ("train", 3, 7, 1, "exchange")
    assert (error.missing, error.elapsed, error.last_step, error.advice) == (("b",), 31.5, 6, "look at b")
    text = str(error)
    for part in ("b is gone", "'train'", "step 7", "epoch 1", "exchange", "missing b", "31.5 s", "6", "look at b"):
        assert part in text


def test_an_unknown_kind_is_the_base_class_and_keeps_its_name() -> None:
    error = errors.from_fault(Fault(b"", "NewKind", "what"), "train")
    assert type(error) is gcclient.GradcommError and "NewKind: what" in str(error)


def test_again_is_equal_but_another_object() -> None:
    error = errors.from_fault(Fault(b"", "StepTimeout", "late", step=2), "train")
    again = error.again()
    assert again is not error and type(again) is type(error) and str(again) == str(error)


@pytest.mark.parametrize("name", [n for n in gcclient.__all__ if isinstance(getattr(gcclient, n), type)])
def test_every_class_says_what_to_do(name: str) -> None:
    kind = getattr(gcclient, name)
    if issubclass(kind, gcclient.GradcommError):
        assert len(kind.__doc__) > 60


def test_errors_survive_a_process_boundary() -> None:
    """torch's launchers and multiprocessing pickle exceptions to report them."""
    error = pickle.loads(pickle.dumps(gcclient.PeerLost("gone", job="j", step=4, missing=("b",))))
    assert type(error) is gcclient.PeerLost and error.step == 4 and error.missing == ("b",)
