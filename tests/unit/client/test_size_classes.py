"""Places that unnamed tensors of many shapes share: sizes, what is in them, and shapes that differ between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gcclient
from gcclient import backend, device, places, session
from gcclient.api import current
from gcclient.collectives import Collectives
from gcclient.places import PLACES
from gcclient.size_classes import FLOOR, HEAD, Fitted, ShapesDiffer, class_of, tells_apart
from gcproto.dtypes import DType
from gcproto.manifest import MIN_BLOCK_BYTES, TensorSpec
from gcproto.messages import DeclareSection, Fault
from tests.unit.client.fake import FakeDaemon, FakeDomain


def _declared(daemon: FakeDaemon) -> list[TensorSpec]:
    return [m.section.tensors[0] for m in daemon.heard[-1] if isinstance(m, DeclareSection)]


# ------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("dtype", list(DType))
def test_a_class_holds_its_tensors_and_less_than_a_fifth_of_zeros(dtype: DType) -> None:
    sizes = {n: class_of(n, dtype) for n in (0, 1, 895, 896, 897, 5000, 12_345, 300_001, 7 << 20, (7 << 20) + 1)}
    for elements, size in sizes.items():
        assert size >= elements + HEAD and size * dtype.itemsize % 512 == 0
        assert size * dtype.itemsize == FLOOR or size - elements - HEAD < size / 5
    assert list(sizes.values()) == sorted(sizes.values())


def test_there_are_four_classes_an_octave() -> None:
    found = {class_of(n, DType.F32) * 4 for n in range(1, 16 << 10)}
    assert sorted(found) == [
        FLOOR,
        *(k << 10 for k in (5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80)),
    ]


# ------------------------------------------------------------------------------------------------ heads
def _place(shape: tuple[int, ...], kind: torch.dtype, place: np.ndarray[Any, Any]) -> tuple[Fitted, torch.Tensor]:
    """A tensor of ones, as ``place`` takes it; it is there."""
    spec = TensorSpec("any", shape, int(device.DTYPES[kind]))
    flat = torch.ones(spec.elements, dtype=kind)
    fitted = Fitted(device.memory_of(flat), spec)
    fitted.load(0, place.nbytes, place)
    return fitted, flat


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", list(device.DTYPES))
def test_ranks_find_that_one_of_them_brought_another_shape(kind: torch.dtype, average: bool) -> None:
    if average and not kind.is_floating_point:
        pytest.skip("is not averaged")
    ranks = 127
    for odd in ((5, 4), (20,), (4, 5)):
        raw = [np.full(class_of(20, device.DTYPES[kind]) * kind.itemsize, 0xFF, np.uint8) for _ in range(2)]
        (many, flat), (one, _) = _place((4, 5), kind, raw[0]), _place(odd, kind, raw[1])
        first, second = (torch.from_numpy(r).view(kind).double() for r in raw)
        total = first * (ranks - 1) + second
        summed = (total / ranks if average else total).to(kind).view(torch.uint8).numpy()
        if odd == (4, 5):
            flat.zero_()
            for fitted in (many, one):
                fitted.store(0, summed.nbytes, summed)
            assert flat.double().tolist() == [1.0 if average or kind is torch.bool else float(ranks)] * 20
        else:
            for fitted in (many, one):
                with pytest.raises(ShapesDiffer):
                    fitted.store(0, summed.nbytes, summed)


def test_heads_whose_ones_could_add_up_to_nothing_are_not_used() -> None:
    assert tells_apart(255, DType.U8) and not tells_apart(256, DType.BOOL)
    assert tells_apart(65_535, DType.I16) and tells_apart(65_536, DType.F32)


# ------------------------------------------------------------------------------------------------ places
@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, joined: FakeDaemon) -> FakeDaemon:
    """Two shapes have places of their own."""
    monkeypatch.setattr(places, "SHAPES", 2)
    return joined


def test_shapes_beyond_the_first_share_places_and_take_turns_in_them(few: FakeDaemon) -> None:
    for elements in (3, 2):
        gcclient.push_pull(torch.ones(elements))
    handles, wanted = [], []
    for i in range(5 * PLACES):
        wanted.append(torch.full((1 + i % 7, 1 + i % 11), float(i)))
        handles.append(gcclient.push_pull_async(wanted[-1]))
        assert [h.over for h in handles] == [j <= i - PLACES for j in range(i + 1)]
    for handle, tensor in zip(handles, wanted, strict=True):
        assert torch.equal(gcclient.synchronize(handle), tensor)
    gcclient.push_pull(torch.ones(3))
    names = [spec.name for spec in _declared(few)]
    own, shared = ["push_pull.noname.0", "push_pull.noname.1"], [f"push_pull.noname.any.{i + 2}" for i in range(PLACES)]
    assert names == [*own, *shared, f"push_pull.noname.{PLACES + 2}"], "a known shape goes on with its own"
    assert {spec.shape for spec in _declared(few)[2:-1]} == {(FLOOR // 4,)}


def test_a_thousand_lengths_take_the_memory_of_a_few_classes(joined: FakeDaemon) -> None:
    for elements in range(100, 1100):
        assert gcclient.push_pull(torch.full((elements,), 2.0)).sum() == 2.0 * elements
    declared = _declared(joined)
    assert len(declared) == places.SHAPES + 2 * PLACES
    assert len({spec.shape for spec in declared}) == places.SHAPES + 2


def test_a_few_large_shapes_have_places_of_their_own(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_OWN_BYTES", 1)
    for elements in range(1, places.FEW_SHAPES + 4):
        gcclient.push_pull(torch.ones(elements))
    assert [".any." in spec.name for spec in _declared(joined)] == [False] * places.FEW_SHAPES + [True] * 3


def test_what_a_longer_tensor_left_is_not_pushed_again(few: FakeDaemon) -> None:
    for elements in (3, 2):
        gcclient.push_pull(torch.ones(elements))
    for _ in range(PLACES):
        gcclient.push_pull(torch.full((800,), float("nan")))
    assert gcclient.push_pull(torch.ones(5)).tolist() == [1.0] * 5
    tensor = current().domains[1].blocks
    pushed = max(tensor.values(), key=lambda place: place.step).input.view(np.float32)
    assert pushed[HEAD : HEAD + 5].tolist() == [1.0] * 5 and not pushed[HEAD + 5 :].any()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_several_blocks_and_of_none(few: FakeDaemon, kind: torch.dtype) -> None:
    for elements in (3, 2):
        gcclient.push_pull(torch.ones(elements))
    block = MIN_BLOCK_BYTES // kind.itemsize
    for shape in ((), (0,), (0, 3), (3 * block + 5,), (2, block - HEAD), (2, block - HEAD // 2)):
        tensor = torch.randint(0, 2, shape).to(kind)
        assert torch.equal(gcclient.push_pull(tensor, average=False), tensor)
        turned = torch.randint(0, 2, (*shape, 2)).to(kind).transpose(0, -1)
        before = turned.clone()
        assert torch.equal(gcclient.push_pull_(turned, average=False), before)
    blocks = current().domains[1].space.blocks
    assert max(len(found) for found in blocks) > 3


def test_all_reduces_of_a_group_share_places_too(few: FakeDaemon) -> None:
    collectives = Collectives(current(), (0,))
    for elements in range(1, 50):
        tensor = torch.arange(float(elements))
        collectives.start(tensor, True).finish()
        assert torch.equal(tensor, torch.arange(float(elements)))
    names = [spec.name for spec in _declared(few)]
    assert len(names) == 2 + PLACES and names[-1] == f"all_reduce.noname.any.{PLACES + 1}"


# ------------------------------------------------------------------------------------- shapes that differ
@pytest.fixture
def other(few: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """As if another rank had brought another shape whenever the place is shared."""
    copy = FakeDomain.copy

    def summed(self: FakeDomain, key: int, step: int) -> None:
        copy(self, key, step)
        block = self.blocks[key]
        if ".any." in self.space.sections[block.section].tensors[0].name:
            slot = self.plans[block.lane].slots[key]
            self.maps[block.lane][slot.chunk][slot.output : slot.output + 4 * HEAD] = b"\x3f" * 4 * HEAD

    monkeypatch.setattr(FakeDomain, "copy", summed)
    for elements in (3, 2):
        gcclient.push_pull(torch.ones(elements))
        Collectives(current(), (0,)).start(torch.ones(elements), True).finish()
    return few


def _verdict(message: Any) -> Fault | None:
    """What daemons say of a second declaration under a shared place's name."""
    if (
        isinstance(message, DeclareSection)
        and (spec := message.section.tensors[0]).shape == (4,)
        and "any" in spec.name
    ):
        return Fault(b"j" * 16, "TensorMismatch", f"shape of tensor 0 differs: {spec.describe()} here")
    return None


def test_a_shape_of_another_rank_is_for_the_daemons_to_name(other: FakeDaemon) -> None:
    other.answer = _verdict
    handle = gcclient.push_pull_async(torch.ones(4))
    for _ in range(2):
        with pytest.raises(gcclient.TensorMismatch, match=r"noname.any.2' shape \[4\] dtype F32 here"):
            gcclient.synchronize(handle)
    with pytest.raises(gcclient.TensorMismatch, match=r"noname.any.2"):
        gcclient.push_pull(torch.ones(3))


def test_of_daemons_that_say_nothing_it_does_not_depend(other: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcclient.size_classes.GRACE", 0.05)
    monkeypatch.setattr(session, "SAY_EVERY", 0.02)
    with pytest.raises(gcclient.TensorMismatch, match=r"rank 0 brought 'push_pull.noname.any.2' shape \[4\]"):
        gcclient.push_pull(torch.ones(4))
    with pytest.raises(gcclient.TensorMismatch, match="same shapes"):
        gcclient.push_pull(torch.ones(4), "named")


def test_who_reads_does_not_wait_for_the_verdict(
    other: FakeDaemon, torch_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.Group, "size", lambda self: 2)
    monkeypatch.setattr(places, "SHAPES", 0)
    monkeypatch.setattr(places, "FEW_SHAPES", 0)
    group: Any = dist.new_group(backend="gc")
    tensor = torch.full((4,), 5.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    other.wait(lambda: _declared(other)[-1].shape == (4,))
    assert not work.is_completed()
    spec = _declared(other)[-1]
    other.say(-1, Fault(b"j" * 16, "TensorMismatch", f"shape of tensor 0 differs: {spec.describe()} here"))
    with pytest.raises(gcclient.TensorMismatch, match=r"all_reduce.noname.any.0' shape \[4\]"):
        work.wait()
    assert tensor.tolist() == [5.0] * 4
