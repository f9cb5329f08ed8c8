"""What users hand in: taken in every usual form, refused by name before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gcclient
from gcproto.messages import DeclareDomain, DeclareSection, Register
from tests.unit.client.fake import FakeDaemon


def _set(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)


def _registered(daemon: FakeDaemon, **arguments: Any) -> Register:
    """What the daemon hears of ``init`` with these arguments."""
    gcclient.init(0, 1, socket=daemon.socket, **arguments)
    gcclient.shutdown()
    (register,) = (m for m in daemon.heard[-1] if isinstance(m, Register))
    return register


@pytest.mark.parametrize(
    ("given", "variable", "seconds"),
    [(None, "1800s", 1800.0), (None, "5m", 300.0), (None, "30", 30.0), (None, "", 0.0), (None, None, 0.0),
     (7, "5m", 7.0), ("2m", "5m", 120.0)],
)  # fmt: skip
def test_a_deadline_is_written_as_in_the_daemons_configuration(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, given: float | str | None, variable: str | None, seconds: float
) -> None:
    _set(monkeypatch, "GC_JOB_DEADLINE", variable)
    assert _registered(daemon, deadline=given).deadline == seconds


def test_a_deadline_that_is_none_is_refused_by_name(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_JOB_DEADLINE", "soon")
    with pytest.raises(ValueError, match=r'GC_JOB_DEADLINE=soon: expected a duration such as .*"30s"'):
        gcclient.init(0, 1, socket=daemon.socket)
    with pytest.raises(ValueError, match="deadline=-1: expected"):
        gcclient.init(0, 1, socket=daemon.socket, deadline=-1)
    assert not gcclient.is_initialized()


@pytest.mark.parametrize(
    ("given", "variable", "seed"),
    [(None, "0x10", 16), (3, "16", 3), (np.int64(3), None, 3), (0, None, 0), (None, "", None), (None, None, None)],
)
def test_a_seed_comes_from_the_argument_or_the_environment(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, given: int | None, variable: str | None, seed: int | None
) -> None:
    _set(monkeypatch, "GC_SEED", variable)
    assert _registered(daemon, seed=given).seed == seed


@pytest.mark.parametrize(
    ("given", "variables", "words"),
    [(("auto", "fast"), (None, None), ("auto", "fast")), ((None, None), ("lgreco", "safe"), ("lgreco", "safe")),
     (("static", None), ("auto", "balanced"), ("static", "balanced")), ((None, ""), ("", None), ("", ""))],
)  # fmt: skip
def test_plan_and_quality_come_from_arguments_or_the_environment(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str | None, str | None],
    variables: tuple[str | None, str | None],
    words: tuple[str, str],
) -> None:
    for name, value in zip(("GC_PLAN", "GC_QUALITY"), variables, strict=True):
        _set(monkeypatch, name, value)
    register = _registered(daemon, plan=given[0], quality=given[1])
    assert (register.plan, register.quality) == words


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [("dc2-da2", "dc2-da5", "dc2-da2"), (None, "none", "none"), (None, None, "")],
)
def test_a_controller_comes_from_the_argument_or_the_environment(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, found: str
) -> None:
    _set(monkeypatch, "GC_CONTROLLER", variable)
    assert _registered(daemon, controller=given).controller == found


def test_another_plan_or_quality_is_refused_by_name(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_PLAN", "clever")
    with pytest.raises(ValueError, match="GC_PLAN=clever: expected one of static, auto"):
        gcclient.init(0, 1, socket=daemon.socket)
    with pytest.raises(ValueError, match="quality=best: expected one of safe, balanced, fast"):
        gcclient.init(0, 1, socket=daemon.socket, plan="auto", quality="best")
    assert not gcclient.is_initialized() and not daemon.accepted[-1]


def test_a_seed_that_is_none_is_refused_by_name(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_SEED", "lucky")
    with pytest.raises(ValueError, match="GC_SEED=lucky: expected a whole number"):
        gcclient.init(0, 1, socket=daemon.socket)
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match=f"seed={wrong}: expected 0"):
            gcclient.init(0, 1, socket=daemon.socket, seed=wrong)
    assert not gcclient.is_initialized()


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"seed": 1.5}, TypeError, r"seed=1\.5: expected a whole number, got a float"),
        ({"seed": True}, TypeError, "seed=True: expected a whole number, got a bool"),
        ({"seed": "5"}, TypeError, "seed='5': expected a whole number"),
        ({"on_loss": 5}, TypeError, "on_loss=5: expected text, got a int"),
        ({"job": 5}, TypeError, "job=5: expected text"),
        ({"job": "a\udc80"}, ValueError, r"job='a\\udc80': expected text that UTF-8 can encode"),
        ({"rank": 0.0}, TypeError, r"rank=0\.0: expected a whole number"),
        ({"world_size": True}, TypeError, "world_size=True: expected a whole number"),
        ({"local_rank": "0"}, TypeError, "local_rank='0': expected a whole number"),
        ({"local_size": 1.0}, TypeError, "local_size=1.0: expected a whole number"),
        ({"deadline": True}, ValueError, "deadline=True: expected a duration"),
        ({"deadline": [3]}, ValueError, "expected a duration"),
        ({"deadline": 10**400}, ValueError, "expected a duration"),
    ],
)
def test_what_no_message_can_carry_is_refused_before_anything_is_sent(
    daemon: FakeDaemon, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        gcclient.init(**({"rank": 0, "world_size": 1, "socket": daemon.socket} | wrong))
    assert not gcclient.is_initialized() and daemon.accepted[-1] == 0


def test_variables_are_text_that_a_message_can_carry(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GC_JOB", "GC_JOB_ON_LOSS"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "a\udc80")  # what Python makes of a byte that is no UTF-8
            with pytest.raises(ValueError, match=rf"{variable}='a\\udc80': expected text that UTF-8"):
                gcclient.init(0, 1, socket=daemon.socket)
    assert daemon.accepted[-1] == 0


def test_numbers_and_text_of_numpy_are_taken_as_what_they_are(daemon: FakeDaemon) -> None:
    gcclient.init(np.int64(0), np.int32(1), socket=daemon.socket, job=np.str_("unit"), deadline=np.float32(30))
    gcclient.shutdown()
    (register,) = (m for m in daemon.heard[-1] if isinstance(m, Register))
    assert (register.label, register.rank, register.world_size, register.deadline) == ("unit", 0, 1, 30.0)


@pytest.mark.parametrize("make", [lambda n: gcclient.push_pull(torch.ones(3), n), lambda n: gcclient.empty(n, 3)])
def test_a_name_that_no_message_can_carry_is_refused_and_the_next_is_taken(joined: FakeDaemon, make: Any) -> None:
    for wrong, said in (("a\udc80", "expected text that UTF-8 can encode"), ("x" * 4097, "at most 4096 characters")):
        with pytest.raises(ValueError, match=said):
            make(wrong)
    for good in ("x" * 4096, "\N{SNOWMAN}\0", np.str_("numpy's"), ""):
        assert make(good).shape == (3,)
    assert torch.equal(gcclient.push_pull(torch.ones(3)), torch.ones(3))


def test_what_a_model_says_of_itself_is_refused_likewise(joined: FakeDaemon) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="compression=5: expected text"):
        gcclient.state(model, compression=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compression='a\\udc80'"):
        gcclient.state(model, compression="a\udc80")
    model.register_parameter("b\udc80", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"name='b\\udc80'"):
        gcclient.state(model)
    assert not any(isinstance(m, DeclareDomain) for m in joined.heard[-1])
    assert gcclient.state(torch.nn.Linear(2, 2), whole=1).domain.declared.label == "ddp.0"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3), (2, 3)), (((2, 3),), (2, 3)), ((torch.Size([2, 3]),), (2, 3)), (([2, 3],), (2, 3)), ((), ()),
        (((),), ()), ((np.int64(4),), (4,)), ((0, 5), (0, 5)),
    ],
)  # fmt: skip
def test_a_shape_is_written_as_in_torch(joined: FakeDaemon, shape: Any, expected: tuple[int, ...]) -> None:
    tensor = gcclient.empty("w", *shape)
    assert tensor.shape == expected
    (declared,) = (m.section.tensors[0] for m in joined.heard[-1] if isinstance(m, DeclareSection))
    assert declared.shape == expected and all(type(d) is int for d in declared.shape)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((3.0,), TypeError), (((3.0, 2),), TypeError), ((True,), TypeError), (("3",), TypeError), ((None,), TypeError),
        (((2, 3), 4), TypeError), ((((2,),),), TypeError), ((-5,), ValueError), (((2, -1),), ValueError),
        ((1 << 62, 1 << 62), ValueError), ((0, 1 << 62), ValueError),
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused_before_anything_is_sent(
    joined: FakeDaemon, shape: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="shape="):
        gcclient.empty("w", *shape)
    assert not any(isinstance(m, DeclareDomain | DeclareSection) for m in joined.heard[-1])
    assert torch.equal(gcclient.push_pull(torch.ones(3), "after"), torch.ones(3))
