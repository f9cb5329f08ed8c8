"""Which steps are measured and what the message of one says: clocks moved by hand, then DDP in a world of one.

What may live here: tests of `gcclient/timing.py`. What may not: what the daemon makes of the message.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import timing, tolerance
from gcclient.timing import DEPARTED_STEPS, EVERY, FIRST, FIRST_STEPS, READINGS, WINDOW, Timing, measured
from gcproto.messages import DeclareSection
from gcproto.timings import TensorTimes
from tests.unit.client.fake import FakeDaemon


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cores:
    """Stands for the system's word about a thread that waits for a core."""

    def __init__(self) -> None:
        self.waited = 0.0

    def here(self) -> None: ...

    def seconds(self) -> float:
        return self.waited


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "perf_counter", made)
    monkeypatch.setattr(timing, "CoreWait", Cores)
    return made


class Session:
    """Stands for the connection to the daemon, which a test starts again by counting."""

    def __init__(self) -> None:
        self.taken = 1
        self.sent: list[TensorTimes] = []

    def inform(self, message: TensorTimes) -> None:
        self.sent.append(message)


class Worker:
    """Three parameters whose gradients come when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.session = Session()
        self.sent = self.session.sent
        self.timing = Timing(7, self.session)
        self.cores = self.timing._cores
        self.tensors = [torch.zeros(2, requires_grad=True) for _ in range(3)]
        self.timing.watch(self.tensors)
        self.step = 0

    def ready(self, index: int, after: float) -> None:
        self.clock.now += after
        self.tensors[index].sum().backward()

    def wait_for_a_core(self, seconds: float) -> None:
        self.clock.now += seconds
        self.cores.waited += seconds

    def end(self, back: float = 0.01) -> None:
        self.step += 1
        self.timing.closed(self.step)
        self.clock.now += back
        self.timing.back(self.step)

    def until(self, step: int) -> None:
        """So many steps of half a second and a result's 10 ms, without a gradient."""
        while self.step < step - 1:
            self.clock.now += 0.5
            self.end()


@pytest.fixture
def worker(clock: Clock) -> Worker:
    return Worker(clock)


def test_few_steps_are_measured() -> None:
    chosen = [step for step in range(2 * EVERY + 100) if measured(step)]
    assert chosen[:FIRST_STEPS] == list(range(FIRST, 13))
    assert chosen[FIRST_STEPS:] == [500, 501, 502, 1000, 1001, 1002]


def test_what_is_no_part_of_a_step_counts_nowhere(worker: Worker) -> None:
    def stand(seconds: float) -> None:
        began = worker.clock.now
        worker.clock.now += seconds
        worker.timing.stood(began)

    worker.until(FIRST)
    stand(7.0)  # between two steps, as for the optimizer wrapper
    worker.ready(2, 0.2)
    stand(3.0)  # during the backward pass, as for DDP
    worker.ready(1, 0.02)
    worker.ready(0, 0.1)
    worker.end()
    (message,) = worker.sent
    assert message.ready == (120_000, 20_000, 0)
    assert (message.forward, message.between) == (200_000, 330_000)


def test_a_measured_step_says_when_each_gradient_came(worker: Worker) -> None:
    worker.until(FIRST)
    assert not worker.sent
    worker.ready(2, 0.3)
    worker.ready(0, 0.1)
    worker.clock.now += 0.02
    worker.timing.copied(1000, worker.clock.now - 0.02)
    worker.ready(1, 0.1)
    worker.end()
    # Copying is not computing: the 20 ms count in no time but the step's own.
    (message,) = worker.sent
    assert (message.domain, message.step, message.ready) == (7, FIRST, (100_000, 200_000, 0))
    assert (message.forward, message.between, message.typical) == (300_000, 530_000, 510_000)
    assert (message.copied, message.copying) == (1000, 20_000)


def test_waiting_for_a_core_is_part_of_the_step_alone(worker: Worker) -> None:
    worker.until(FIRST)
    worker.wait_for_a_core(0.05)
    worker.ready(2, 0.3)
    worker.wait_for_a_core(0.07)
    worker.ready(0, 0.1)
    began = worker.timing.clock()
    worker.clock.now += 0.02
    worker.wait_for_a_core(0.03)
    worker.timing.copied(1000, began)
    worker.ready(1, 0.1)
    worker.end()
    (message,) = worker.sent
    assert message.ready == (100_000, 200_000, 0)
    assert (message.forward, message.copying) == (300_000, 20_000)
    assert message.between == 680_000


def test_a_parameter_without_a_gradient_is_not_known(worker: Worker) -> None:
    worker.until(FIRST)
    worker.ready(1, 0.1)
    worker.end()
    assert worker.sent[0].ready == (-1, 0, -1)


def test_of_accumulated_passes_the_last_counts(worker: Worker) -> None:
    worker.until(FIRST)
    for index in (2, 1, 0):
        worker.ready(index, 0.1)
    for index in (2, 1, 0):
        worker.ready(index, 0.2)
    worker.end()
    (message,) = worker.sent
    # What came before the pass that is pushed is time without a gradient.
    assert message.ready == (400_000, 200_000, 0) and message.forward == 500_000


def test_results_that_are_late_or_of_another_step_tell_nothing_of_the_forward_pass(worker: Worker) -> None:
    worker.until(FIRST)
    worker.timing._back = (FIRST - 2, 1.0)
    worker.ready(0, 0.1)
    worker.end()
    worker.timing._back = (FIRST, worker.clock.now + 9.0)
    worker.ready(0, 0.1)
    worker.end()
    assert [m.forward for m in worker.sent] == [-1, -1]


def test_the_time_between_steps_needs_the_step_before(worker: Worker) -> None:
    worker.until(3)
    worker.step = EVERY - 2
    worker.until(EVERY)
    worker.ready(0, 0.1)
    worker.timing.closed(EVERY)
    assert worker.sent[0].between == 110_000
    assert len(worker.timing._between) == 2, "the gap in the numbers is no time between two steps"


def test_other_steps_send_nothing(worker: Worker) -> None:
    for _ in range(FIRST + FIRST_STEPS + 20):
        worker.ready(0, 0.1)
        worker.end()
    assert [m.step for m in worker.sent] == list(range(FIRST, FIRST + FIRST_STEPS))


def test_steps_that_take_longer_than_they_did_are_measured_again(worker: Worker) -> None:
    """Once, when that has lasted for two windows; a change that goes away is none."""

    def steps(count: int, seconds: float) -> list[int]:
        worker.sent.clear()
        for _ in range(count):
            worker.ready(0, seconds)
            worker.end()
        return [m.step for m in worker.sent]

    steps(FIRST + FIRST_STEPS + 2 * WINDOW, 0.1)
    assert steps(WINDOW + 2, 0.13) == [] == steps(2 * WINDOW, 0.1)
    assert steps(2 * WINDOW, 0.11) == []
    changed = worker.step
    again = steps(3 * WINDOW, 0.13)
    assert len(again) == DEPARTED_STEPS == again[-1] + 1 - again[0]
    assert WINDOW < again[0] - changed <= 3 * WINDOW
    assert steps(3 * WINDOW, 0.13) == []
    assert steps(3 * WINDOW, 0.1) == [EVERY, EVERY + 1, EVERY + 2], "as every so often"
    assert steps(4 * WINDOW, 0.1) == [], "so that has been measured"
    assert steps(3 * WINDOW, 0.13) == [], "the next time twice as many windows have to agree"
    assert len(steps(2 * WINDOW, 0.13)) == DEPARTED_STEPS


def test_windows_that_differ_to_either_side_are_no_change(worker: Worker) -> None:
    for window in range(12):
        for _ in range(WINDOW):
            worker.ready(0, 0.1 if window < 2 else (0.2, 0.05)[window % 2])
            worker.end()
    assert [m.step for m in worker.sent] == list(range(FIRST, FIRST + FIRST_STEPS))


def test_a_core_lost_while_the_clock_is_read_does_not_turn_it_back(worker: Worker) -> None:
    """The thread lets others run as it reads; what it waits then is in the second of two numbers only."""
    lost = [0.003] * 3

    class Losing(Cores):
        def seconds(self) -> float:
            if lost:
                worker.wait_for_a_core(lost.pop())
            return self.waited

    began = worker.timing.clock()
    worker.cores = worker.timing._cores = Losing()
    assert worker.timing.clock() == pytest.approx(began) and not lost
    lost += [0.003] * (3 * READINGS)
    worker.timing.clock()
    assert len(lost) >= READINGS, "who always loses it is not held up"


def test_a_daemon_that_was_started_again_is_told_of_some_steps(worker: Worker) -> None:
    worker.until(FIRST + FIRST_STEPS + 20)
    told, step = len(worker.sent), worker.step
    worker.session.taken += 1
    worker.until(step + 2 * DEPARTED_STEPS + 1)
    assert [m.step for m in worker.sent[told:]] == list(range(step + 2, step + 2 + DEPARTED_STEPS))


def test_who_comes_into_a_job_looks_at_a_whole_window_first(worker: Worker) -> None:
    worker.step = 1000
    for _ in range(3 * WINDOW):
        worker.ready(0, 0.1)
        worker.end()
    assert [m.step for m in worker.sent] == [1002]


@pytest.mark.parametrize("stands", [True, False])
def test_a_measured_step_says_whether_the_optimizer_stands_late_gradients(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    monkeypatch.setattr(tolerance, "tolerant", lambda: stands)
    worker.until(FIRST)
    worker.ready(0, 0.1)
    worker.end()
    assert [message.tolerant for message in worker.sent] == [stands]


def test_another_optimizer_is_told_of_with_the_next_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    stands = True
    monkeypatch.setattr(tolerance, "tolerant", lambda: stands)
    worker.until(FIRST + FIRST_STEPS + 20)
    told = len(worker.sent)
    stands = False
    worker.until(FIRST + FIRST_STEPS + 40)
    assert [m.tolerant for m in worker.sent[told:]] == [False], "once"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ddp_tells_the_daemon_of_its_gradients(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    monkeypatch.setattr(tolerance, "_stepped", {})
    net = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 7))
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=momentum)
    for _ in range(FIRST + FIRST_STEPS + 2):
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
    alone.wait(lambda: sum(isinstance(m, TensorTimes) for m in alone.heard[-1]) == FIRST_STEPS)
    (section,) = (m.section for m in alone.heard[-1] if isinstance(m, DeclareSection))
    layers = [int(t.name.partition(".")[0]) for t in section.tensors]
    nbytes = sum(p.numel() * 4 for p in net.parameters())
    for message in (m for m in alone.heard[-1] if isinstance(m, TensorTimes)):
        assert len(message.ready) == len(section.tensors) and min(message.ready) == 0
        # Times without what the worker waited for a core may be equal.
        pairs = zip(message.ready, layers, strict=True)
        order = [layer for _, layer in sorted(pairs, key=lambda pair: (pair[0], -pair[1]))]
        assert order == [2, 2, 1, 1, 0, 0], "the last layer's gradients come first"
        assert message.between > max(message.ready) and message.forward >= 0 and message.typical > 0
        assert message.copied == nbytes and message.copying > 0
        known = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert list(message.buckets) == [int(size) for size in known.split(",")]
        assert len(message.buckets) > 1
        assert message.tolerant is (not momentum)
