"""Target: files that a daemon finds: jobs, ledgers, controllers, plans, numbers, a key; profiles, costs, traces.

An input is what kind of file it is for, and contents by file. A daemon that finds them takes the job up, or drops it,
or ends it with an error; it serves the next one in any case.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from gcproto import messages
from gcproto.messages import DeclareDomain, DeclareSection, Rule, Unregister
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.planner import profile as profiles
from gcserver.planner.profile import ProfileError
from gcserver.planner.standing import Standing
from gcserver.planner.trace import TraceError, parse_trace
from gcserver.runtime import calibration
from gcserver.runtime.lanelink import StepDelays
from gcserver.runtime.ledger import LEDGER
from gcserver.runtime.statefiles import incarnation
from tests.fuzz import mutate, tickets
from tests.fuzz.control import JOB, KINDS, NEXT_JOB, quiet, sound
from tests.fuzz.supervisors import SECTION, Node, Worker, alone
from tests.unit.planner import live_profiles

MEMORY: Final = ("job.msgpack", "steering.msgpack", "planning.msgpack", "00000000.ledger")
NUMBERS: Final = ("generation", "lanes", "supervisor.incarnation")
OTHERS: Final = ("profile", "costs", "trace")
TRACE: Final = b"""{"model": "m", "source": "s", "tensors": [
    {"name": "w", "elements": 768, "gap_us": 0}, {"name": "b", "elements": 8, "gap_us": 2.5}]}"""
#: of a ledger, where it is worth changing: counts, the first voids and switches
_LEDGER_AT: Final = (8, 16, 24, 64, 72, *(LEDGER.fields["switches"][1] + 8 * i for i in range(6)))  # type: ignore[index]


@lru_cache(maxsize=1)
def found() -> dict[str, bytes]:
    """The files of a running job, and the others."""
    quiet()
    folder = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-", dir="/dev/shm"))
    try:
        asyncio.run(_run(folder))
        kept = {name: (folder / "state" / "jobs" / JOB.hex() / name).read_bytes() for name in MEMORY}
    finally:
        shutil.rmtree(folder)
    gpt = live_profiles.with_errors(live_profiles.gpt(), "topk")
    small = msgspec.structs.replace(gpt, tensors=gpt.tensors[:3], blocks=gpt.blocks[:3])
    return {
        **kept, **dict.fromkeys(NUMBERS, b"1234567"), "profile": profiles.dump(small), "trace": TRACE,
        tickets.FILE: tickets.KEY, "costs": msgspec.json.encode(small.codecs),
    }  # fmt: skip


async def _run(folder: Path) -> None:
    """A job of one node that has settled two steps under a second plan, with a controller and a planner's standing."""
    node = Node(0, 100, folder)
    worker = Worker(node)
    try:
        await alone(node, worker, JOB)
        rules = (Rule("w", "topk(ratio=0.01)", "", (20_000, 10_000)),)
        node.feed(cx.SetPlan(1, JOB.hex(), rules, True, "dc2-da2"))
        for step in range(1, 6):
            node.steering.measured(StepDelays((JOB, 0), ((step, 0.01, 0.001, 1000),)))
            node.feed(cx.LaneSaid(0, fx.ReportStep((JOB, 0), step, step == 3, node.machine.jobs[JOB].proposal, 5)))
        job = node.machine.jobs[JOB]
        node.planning.set_mode(job, "auto", "fast")
        node.store.save_planning(JOB, msgspec.msgpack.encode(Standing("auto", "fast", (), (), 0)))
    finally:
        worker.sock.close()
        node.close()


class Files:
    """A daemon's start over spoiled files."""

    name = "files"

    def __init__(self) -> None:
        found()

    def close(self) -> None:
        pass

    def draw(self, rng: random.Random) -> bytes:
        kind = rng.choice(("memory", "memory", "memory", *NUMBERS, tickets.FILE, *OTHERS, *OTHERS))
        if kind == "memory":
            changes = {name: _spoiled(rng, name) for name in rng.sample(MEMORY, rng.choice((1, 1, 2)))}
            return msgspec.msgpack.encode((kind, changes))
        return msgspec.msgpack.encode((kind, {kind: _spoiled(rng, kind)}))

    def feed(self, data: bytes) -> str:
        kind, contents = msgspec.msgpack.decode(data, type=tuple[str, dict[str, bytes]])
        if kind in OTHERS:
            return f"{kind} {_read(kind, contents[kind])}"
        folder = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-", dir="/dev/shm"))
        try:
            state = folder / "state"
            memory = state / "jobs" / JOB.hex()
            memory.mkdir(parents=True)
            for name, content in {**found(), **contents}.items():
                if name in MEMORY:
                    (memory / name).write_bytes(content)
                elif name in (*NUMBERS, tickets.FILE):
                    (state / name).write_bytes(content)
            return f"{kind} {asyncio.run(_start(folder))}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _spoiled(rng: random.Random, name: str) -> bytes:
    valid = found()[name]
    if name == "00000000.ledger":
        content = bytearray(valid)
        if rng.random() < 0.2:
            return bytes(content[: rng.randrange(len(content))])
        for _ in range(rng.choice((1, 2, 4))):
            at = rng.choice(_LEDGER_AT)
            content[at : at + 8] = (mutate.number(rng, 3) % 2**64).to_bytes(8, "little")
        return bytes(content)
    if name in NUMBERS:
        text = str(mutate.number(rng)).encode() if rng.random() < 0.5 else valid
        return mutate.spoil(rng, text) if rng.random() < 0.7 else text
    if name == tickets.FILE:
        return mutate.spoil(rng, valid)
    if name in OTHERS:
        if rng.random() < 0.2:
            return mutate.spoil(rng, valid)
        return mutate.json(mutate.grow(rng, msgspec.json.decode(valid)))
    return mutate.packed(rng, valid)


def _read(kind: str, content: bytes) -> str:
    try:
        if kind == "profile":
            again = profiles.load(content, "file")
            assert profiles.load(profiles.dump(again), "file") == again
        elif kind == "trace":
            parse_trace(content, "file")
        else:
            with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="gradcomm-fuzz-") as file:
                file.write(content)
                file.flush()
                return "read" if calibration._read(Path(file.name)) else "refused"
    except (ProfileError, TraceError):
        return "refused"
    return "read"


async def _start(folder: Path) -> str:
    """As `Supervisor.run` begins, then a worker that comes back, two steps, and another job."""
    node = Node(0, 100, folder)
    workers = [Worker(node)]
    try:
        node.store.lanes(1)
        node.store.generation()
        incarnation(node.state / "supervisor.incarnation")
        for memory, ledgers in node.store.load():
            node.steering.restore(memory.record.job, node.store.steering(memory.record.job))
            node.feed(cx.JobRestored(memory, ledgers))
        sound(node)
        node.feed(cx.LaneUp(0))
        node.steering.lane_up()
        outcome = await _return(node, workers[0])
        for job in list(node.machine.jobs):
            node.planning.course(node.machine.jobs[job])
        node.feed(ev.Tick())
        workers[0].leave()
        workers.append(Worker(node))
        await alone(node, workers[1], NEXT_JOB)
        node.feed(cx.LaneSaid(0, fx.ReportStep((NEXT_JOB, 0), 1, False, 0, 5)))
        assert node.machine.jobs[NEXT_JOB].domains[0].settled == 1
        workers[1].say(Unregister())
        await asyncio.sleep(0)
        assert NEXT_JOB not in node.machine.jobs
        sound(node)
        return outcome
    finally:
        for worker in workers:
            worker.sock.close()
        node.close()


async def _return(node: Node, worker: Worker) -> str:
    """The job's worker comes back, and two more steps are reported."""
    worker.say(messages.Reattach(JOB, 0, 1, tickets.ticket(JOB, 0)))
    worker.say(DeclareDomain("ddp", 0, (0,), True), DeclareSection(0, SECTION))
    for _ in (1, 2):
        job = node.machine.jobs.get(JOB)
        if job is None or 0 not in job.domains:
            break
        node.feed(cx.LaneSaid(0, fx.ReportStep((JOB, 0), job.domains[0].settled + 1, False, job.proposal, 5)))
    await asyncio.sleep(0)
    worker.hear()
    faults = worker.heard(messages.Fault)
    assert all(f.kind in KINDS for f in faults), faults
    sound(node)
    return faults[0].kind if faults else "went on"
