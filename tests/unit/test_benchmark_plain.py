"""The plain torch peers of the codec benchmark do what their codecs do."""

from __future__ import annotations

import pytest
import torch

from benchmarks import plain

N, K = 100_003, 1000


def gradient(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*plain.ESTIMATES, "threshold"])
def test_what_is_sent_and_what_is_kept_are_the_gradient(name: str) -> None:
    torch.manual_seed(0)
    method = plain.make(name, N, K, 2.5 * 0.5, torch.zeros(N))
    assert isinstance(method, plain.Thresholded)
    carried = torch.zeros(N)
    for step in range(3):
        x = gradient(step)
        payload = method.encode(x, 0.5)
        assert K / 20 < payload[0].numel() < 20 * K
        sent = torch.zeros(N)
        method.decode_add(payload, sent)
        assert method.residual is not None
        assert torch.equal(sent + method.residual, torch.add(carried, x, alpha=0.5))
        carried = method.residual.clone()


def test_without_error_feedback_nothing_is_kept() -> None:
    method = plain.make("gaussiank", N, K, 0.0)
    assert isinstance(method, plain.Thresholded)
    index, values = method.encode(gradient(), 0.5)
    assert method.residual is None and torch.equal(values, gradient()[index] * 0.5)


@pytest.mark.parametrize("name", ["signsgd", "signum"])
def test_signs_come_back(name: str) -> None:
    method = plain.make(name, N, K, 0.0)
    assert isinstance(method, plain.Signs)
    payload, dense = method.encode(gradient(), 0.5), torch.ones(N)
    assert payload.numel() == -(-N // 8)
    method.decode_add(payload, dense)
    assert torch.equal(dense, torch.where(gradient() >= 0, 2.0, 0.0))


def test_natural_rounds_to_a_neighbouring_power_of_two_without_bias() -> None:
    method = plain.make("natural", N, K, 0.0)
    assert isinstance(method, plain.Natural)
    torch.manual_seed(0)
    mean = torch.zeros(N)
    for _ in range(200):
        method.decode_add(method.encode(gradient(), 1.0), mean)
    one = torch.zeros(N)
    method.decode_add(method.encode(gradient(), 1.0), one)
    ratio = one / gradient()
    assert bool(((ratio > 0.5) & (ratio <= 2.0)).all()) and bool((torch.frexp(one)[0].abs() == 0.5).all())
    assert float((mean / 200 - gradient()).sum().abs()) < 0.01 * float(gradient().abs().sum())


def test_other_methods_have_their_peers_elsewhere() -> None:
    assert plain.make("topk", N, K, 0.0) is None
