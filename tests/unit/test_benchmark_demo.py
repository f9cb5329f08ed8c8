"""What the demo computes: the text, the model, figures of runs, the bandwidth above which compression stops paying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import gpt, report, text
from examples.runs import Method, Record, Run, Step
from tests.soak import throughput, worker


def record(name: str, seconds: float, sent: int, losses: list[float]) -> Record:
    steps = [Step(i + 1, (i + 1) * seconds, loss, (0, 0) if i == 0 else (sent, sent)) for i, loss in enumerate(losses)]
    return Record(Method(name, "gloo" if name == "gloo" else "gradcomm"), steps)


def test_the_text_is_the_same_twice_and_in_range() -> None:
    one, two = text.load(limit=200_000), text.load(limit=200_000)
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.val, two.val)
    assert one.train.numel() == 190_000
    assert int(one.train.max()) < text.VOCABULARY == gpt.Shape().vocabulary
    inputs, targets = text.batch(one.train, 3, 16, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_model_is_decided_by_its_seed_and_learns() -> None:
    torch.manual_seed(1)
    model = gpt.GPT(seed=3)
    torch.manual_seed(2)
    again = gpt.GPT(seed=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.token.weight, gpt.GPT(seed=4).token.weight)
    assert 2.9e6 < sum(p.numel() for p in model.parameters()) < 3.1e6

    small = gpt.GPT(gpt.Shape(layers=1, width=32, heads=2, context=16))
    optimizer = gpt.Optimizer(small)
    inputs, targets = text.batch(text.load(limit=50_000).train, 8, 16, torch.Generator().manual_seed(1))
    losses = []
    for _ in range(30):
        loss = gpt.loss(small(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_prediction_does_not_see_what_comes_later() -> None:
    model = gpt.GPT(gpt.Shape(layers=2, width=32, heads=2, context=16))
    tokens = torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 5
    assert torch.allclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-5)


def test_figures_of_a_run_leave_out_its_first_steps() -> None:
    run = record("gloo", 1.0, 100, [5.0, 4.0, 3.0, 2.0])
    run.steps[0] = Step(1, 0.0, 5.0, (0, 0))
    run.steps[1] = Step(2, 0.5, 4.0, (900, 900))
    assert run.durations(2) == [2.5, 1.0]
    assert run.step_bytes() == 100
    assert run.loss_at(4, window=2) == 2.5
    assert run.loss_at(1) == 5.0


def test_break_even_is_where_both_take_the_same_time() -> None:
    plain, alone = record("gloo", 1.0, 12_000_000, [1.0] * 6), record("off", 0.10, 0, [1.0] * 6)
    even = report.break_even(plain, alone, record("x", 0.12, 400_000, [1.0] * 6))
    assert even.bits_per_second is not None
    ideal = 0.10 + 8 * 12e6 / even.bits_per_second
    assert ideal == pytest.approx(0.12 + 8 * 0.4e6 / even.bits_per_second)
    assert "stops helping above about 4.6 Gbit/s" in report.say_break_even(even)
    unseen = report.break_even(plain, alone, record("y", 0.09, 100, [1.0] * 6))
    assert unseen.bits_per_second is None
    assert "too small to be seen" in report.say_break_even(unseen)


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    timed = [record("gloo", 1.0, 12_000_000, [4.0] * 12), record("onebit", 0.2, 400_000, [4.1] * 12)]
    long = {"gloo": record("gloo", 1.0, 12_000_000, [3.0] * 20), "onebit": record("onebit", 0.2, 4, [2.5] * 90)}
    rows = report.rows(timed, long, "100mbit")
    assert rows[1]["speedup"] == pytest.approx(5.0)
    assert rows[1]["loss_compared_at_step"] == 20
    assert all(not isinstance(value, dict | list) for row in rows for value in row.values())
    printed = report.table(rows)
    assert "5.00x" in printed
    assert "loss, 20 steps" in printed
    report.plot(long, rows, "title", tmp_path / "x.png")
    assert 5_000 < (tmp_path / "x.png").stat().st_size < 200_000
    assert "-" in report.table(report.rows(timed, {}, None))


def test_logs_are_read_as_they_grow(tmp_path: Path) -> None:
    from benchmarks.lab import netns

    run = Run(Method("gloo", "gloo"), netns.Loopback(2).hosts, None, tmp_path, steps=1, job="j")

    def write(rank: int, text: str) -> None:
        with (tmp_path / f"j.{rank}.jsonl").open("a") as file:
            file.write(text)

    lines = [json.dumps({"step": i, "s": i * 0.5, "sent": 100 * i, "loss": 4.0 - i}) + "\n" for i in (1, 2)]
    write(0, lines[0] + lines[1][:10])
    assert not run.update()  # the other rank has nothing yet
    write(1, lines[0])
    assert run.update()
    assert [s.sent for s in run.record.steps] == [(0, 0)]
    write(0, lines[1][10:])
    write(1, lines[1])
    assert run.update()
    assert run.record.steps[1] == Step(2, 1.0, 2.0, (100, 100))


def test_what_the_soak_expects_is_what_ranks_push() -> None:
    for ranks in (2, 4):
        gradients = worker.Gradients(ranks, seed=5)
        for step in (1, 77):
            total = [sum(parts) for parts in zip(*(gradients.pushed(r, step) for r in range(ranks)), strict=True)]
            for summed, want in zip(total, gradients.average(step), strict=True):
                assert worker.differing(summed / ranks + 0.0, want) == 0
                assert torch.equal(want.half().float(), want)  # also exact in fp16
        stale = zip(gradients.average(1), gradients.average(2), strict=True)
        assert all(worker.differing(a, b) for a, b in stale)


def test_the_soak_judges_growth() -> None:
    def samples(grow: int, fds: int = 50) -> list[throughput.Sample]:
        return [
            throughput.Sample(t * 0.5, t * 10**6, 10**8 + grow * t, 10**7, fds + (t // 20 if fds > 50 else 0))
            for t in range(120)
        ]

    idle = throughput.Sample(0.0, 0, 10**8, 0, 40)
    most = (10**9, 10**9)
    assert all(v.good for v in throughput.judge(samples(0), idle, idle, most))
    bad = [v.what for v in throughput.judge(samples(10**6), idle, idle, most) if not v.good]
    assert bad == ["daemons' memory"]
    assert [v.what for v in throughput.judge(samples(0, 51), idle, idle, most) if not v.good] == ["descriptors"]
    for most, what in (
        ((10**8 - 1, 10**9), "daemons' memory, formula"),
        ((10**9, 10**7 - 1), "shared memory, formula"),
    ):
        assert [v.what for v in throughput.judge(samples(0), idle, idle, most) if not v.good] == [what]
    left = throughput.Sample(0.0, 0, 10**8, 3 << 20, 60)
    bad = [v.what for v in throughput.judge(samples(0), idle, left, (10**9, 10**9)) if not v.good]
    assert bad == ["shared memory, jobs gone", "descriptors, jobs gone"]
