"""What workers of a node send each other encoded: messages, residuals, steps that do not count, checkpoints of it.

What may not live here: collectives (`test_node_group.py`), training (`tests/integration/test_node_codec.py`).
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import gcclient
from gcclient import node_states
from gcclient.gpu_codecs import GpuCodecError, make
from gcclient.hierarchy import Nodes, part
from gcclient.node_codec import LEAST, Layout, Message, NodeCodec, read_node_codec
from gcclient.node_group import Cut
from gcclient.parameters import Parameter
from gcproto.dtypes import DType

#: names and elements; the last two are never encoded: one is small, one is left out
SIZES = {"first": 9_001, "second": 4 * LEAST, "bias": 300, "kept": 5_000}
SPECS = [
    "onebit",
    "efsignsgd",
    "topk(ratio=0.05)",
    "topk(ratio=0.05,values=8)",
    "randomk(ratio=0.1)",
    "qsgd(bits=4)+ef",
    "qsgd(bits=3,bucket=512)",
    "terngrad",
    "fp16",
    "bf16",
]
OFF = [s for s in SPECS if make(s).error_feedback]
READY = threading.Event()
READY.set()


def _parameters(sizes: dict[str, int]) -> list[Parameter]:
    return [Parameter(name, torch.empty(n), DType.F32, ()) for name, n in sizes.items()]


class Node:
    """The ranks of one node, which hand each other messages in this thread."""

    def __init__(self, spec: str, local: int, shards: int, buckets: Sequence[Sequence[str]] = (tuple(SIZES),)) -> None:
        self.codecs = [
            NodeCodec(
                spec, "ddp.0", Nodes(tuple(range(local)), r, shards, (r,) if r < shards else (), (1, 1)), r, SIZES
            )
            for r in range(local)
        ]
        for codec in self.codecs:
            codec.origin = b"o" * 16
            codec.leave_out(["kept"], 0)
        self.buckets = buckets

    def sums(self, grads: Sequence[dict[str, Tensor]], scale: float = 1.0) -> list[dict[str, Tensor]]:
        """The sum of its part of every parameter, of each rank that has a shard; ``grads``: of each rank, flat."""
        shards = self.codecs[0].nodes.shards
        out: list[dict[str, Tensor]] = [{} for _ in range(shards)]
        for names in self.buckets:
            cuts, sent = [], []
            for codec, mine in zip(self.codecs, grads, strict=True):
                buffer = torch.cat([mine[n] for n in names])
                cut = Cut([SIZES[n] for n in names], buffer, codec.nodes)
                cut.pack(buffer)
                layout = Layout(codec, _parameters({n: SIZES[n] for n in names}), cut)
                self.message = Message(codec, layout, codec.steps, scale, READY)
                data, sizes = self.message.encode(cut)
                assert sum(sizes) == data.numel() and sizes[codec.nodes.place] == 0
                cuts.append(cut)
                sent.append(data.clone().split(sizes))
            for k in range(shards):
                message = Message(self.codecs[k], layout, 0, scale, READY)
                received = torch.cat([sent[j][k] for j in range(len(sent)) if j != k])
                assert received.numel() == message.expected * (len(sent) - 1)
                message.add(cuts[k], received)
                parts = cuts[k].shard[: cuts[k].starts[-1]].split(cuts[k].parts[k])
                out[k] |= {n: p.clone() for n, p in zip(names, parts, strict=True)}
        return out

    def settle(self, counts: bool = True) -> None:
        for codec in self.codecs:
            codec.settle(counts)
            codec.steps += 1


def _grads(ranks: int, step: int, dtype: torch.dtype = torch.float32, large: float = 1.0) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(step)
    return [{n: (torch.randn(k, generator=made) * large).to(dtype) for n, k in SIZES.items()} for _ in range(ranks)]


def _mine(grad: Tensor, shards: int, k: int) -> Tensor:
    return grad.float()[slice(*part(grad.numel(), shards, k))]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("local", "shards"), [(2, 2), (2, 1), (3, 2)])
def test_a_shard_is_the_sum_of_what_each_payload_decodes_to(spec: str, local: int, shards: int) -> None:
    """By an oracle that encodes every part by itself; what is few or left out, and a rank's own part, as they are."""
    node, codec = Node(spec, local, shards), make(spec)
    held: dict[tuple[int, str, int], Tensor] = {}
    for step in range(3):
        grads = _grads(local, step)
        found = node.sums(grads)
        node.settle()
        for k in range(shards):
            for name in SIZES:
                total = torch.zeros(0)
                for rank in range(local):
                    brought = _mine(grads[rank][name], shards, k)
                    if rank != k and name in ("first", "second"):
                        n, key = brought.numel(), (rank, name, k)
                        old = held.get(key)
                        new = torch.empty(n) if codec.error_feedback else None
                        payload = torch.empty(codec.max_bytes(n), dtype=torch.uint8)
                        seed = node.codecs[rank]._seed(step, node.message.layout.slots[k][list(SIZES).index(name)])
                        size = codec.encode(brought, old, new, payload, seed=seed).settle().nbytes
                        brought = torch.empty(n)
                        codec.decode(payload[:size], brought)
                        if new is not None:
                            held[key] = new
                    total = brought if not rank else total + brought
                assert torch.equal(found[k][name], total), (step, k, name)


@pytest.mark.parametrize("spec", OFF)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_delivered_is_held_back(spec: str, dtype: torch.dtype) -> None:
    """Over any number of steps, what was delivered and what is held back is what was brought."""
    node, brought, came = Node(spec, 3, 2), [0.0] * 2, [0.0] * 2
    for step in range(6):
        grads = _grads(3, step, dtype)
        found = node.sums(grads)
        node.settle()
        for k in range(2):
            brought[k] += sum(_mine(g["first"], 2, k).double() for g in grads)  # type: ignore[assignment]
            came[k] += found[k]["first"].double()  # type: ignore[assignment]
    for k in range(2):
        left = sum(c._held["first", k].settled.double() for c in node.codecs if c.nodes.place != k)  # type: ignore
        assert isinstance(left, Tensor) and left.abs().max() > 0.1, "nothing was held back"
        assert torch.allclose(came[k] + left, brought[k], atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_bits_do_not_depend_on_buckets(spec: str) -> None:
    """torch makes other buckets after the first step, and after a checkpoint."""
    one = Node(spec, 2, 2)
    other = Node(spec, 2, 2, [("kept", "second"), ("bias",), ("first",)])
    for step in range(3):
        if step == 2:
            other.buckets = [("second",), ("first", "bias", "kept")]
        grads = _grads(2, step)
        for a, b in zip(one.sums(grads), other.sums(grads), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SIZES)
        one.settle()
        other.settle()


@pytest.mark.parametrize("spec", ["onebit", "qsgd(bits=4)+ef", "topk(ratio=0.05)", "fp16"])
def test_residuals_are_kept_without_the_loss_scale(spec: str) -> None:
    plain, scaled = Node(spec, 2, 2), Node(spec, 2, 2)
    for step, scale in enumerate([1024.0, 1024.0, 512.0]):
        grads = _grads(2, step)
        larger = [{n: g * scale for n, g in mine.items()} for mine in grads]
        for a, b in zip(plain.sums(grads), scaled.sums(larger, scale), strict=True):
            assert all(torch.equal(a[name], b[name] / scale) for name in SIZES)
        plain.settle()
        scaled.settle()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_sum_so_and_the_step_leaves_nothing_behind(spec: str, wrong: float) -> None:
    """Also with codecs whose payloads would be finite."""
    one, other = Node(spec, 2, 2), Node(spec, 2, 2)
    for step in range(3):
        grads = _grads(2, step)
        if step == 1:
            bad = _grads(2, 99)
            bad[0]["second"][-1] = wrong
            found = one.sums(bad)
            assert not found[1]["first"].isfinite().all() or not found[1]["second"].isfinite().all()
            assert all(values.isfinite().all() for values in found[0].values())
            for codec in one.codecs:
                codec.settle(False)
        for a, b in zip(one.sums(grads), other.sums(grads), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SIZES)
        one.settle()
        other.settle()


def test_messages_are_short() -> None:
    codec = Node("onebit", 2, 2).codecs[0]
    cut = Cut(list(SIZES.values()), torch.zeros(sum(SIZES.values())), codec.nodes)
    layout = Layout(codec, _parameters(SIZES), cut)
    assert [[s.encoded for s in slots] for slots in layout.slots] == [[True, True, False, False]] * 2
    dense = 4 * (150 + 2500)
    assert dense < layout.sizes[0] < dense + 16 * 6 + (4500 + 2 * LEAST) // 8 + 2 * 16
    assert codec.payload("first", LEAST - 1, torch.float32) == 0
    assert codec.payload("first", 1 << 20, torch.float64) == 0, "only what daemons compress too"
    assert Node("topk(ratio=0.9)", 2, 2).codecs[0].payload("first", 1 << 20, torch.float32) == 0, "longer than it is"
    assert Node("fp16", 2, 2).codecs[0].payload("first", 1 << 20, torch.bfloat16) == 0


@pytest.mark.parametrize("spec", [*SPECS, "qsgd(levels=7)", "topk(ratio=1e-6)", "randomk(ratio=0.5,values=16)"])
def test_lengths_of_payloads_are_known_in_advance(spec: str) -> None:
    codec = make(spec)
    for n in (1, 7, 8, 1023, 1024, 1025, 4096, 65_537):
        out = torch.empty(codec.max_bytes(n), dtype=torch.uint8)
        assert codec.encode(torch.randn(n), None, None, out).settle().nbytes == codec.exact_bytes(n)


@pytest.mark.parametrize("spec", ["sidco-e(ratio=0.01)", "topk(ratio=0.01,packed=1)"])
def test_lengths_that_are_not_say_so(spec: str) -> None:
    assert make(spec).exact_bytes(1 << 20) == -1


def test_which_codecs_go_within_a_node() -> None:
    assert [read_node_codec(given, True) for given in (None, "", "none", " onebit ")] == ["", "", "", "onebit"]
    assert [read_node_codec(spec, "auto") for spec in SPECS] == SPECS
    assert read_node_codec(None, False) == ""
    for given, told in (
        ("powersgd(rank=2)", "shards cut matrices; expected one of fp16, bf16, topk"),
        ("natural", "codec: expected one of fp16, bf16, topk"),
        ("topk", "write topk(ratio=...)"),
        ("topk(ratio=2)", "expected a number in"),
        ("topk(ratio=0.1)+momentum", "a momentum would be in what others sum up"),
        ("sidco-e(ratio=0.01)", "how long its payloads are depends on the gradients"),
        ("topk(ratio=0.01,packed=1)", "how long its payloads are depends on the gradients"),
    ):
        with pytest.raises(ValueError, match=f"node_codec='{re.escape(given)}': .*{re.escape(told)}"):
            read_node_codec(given, True)
    with pytest.raises(ValueError, match="only with hierarchy=True or 'auto'"):
        read_node_codec("onebit", False)
    with pytest.raises(TypeError, match="node_codec=3: expected text, got a int"):
        read_node_codec(3, True)


def test_a_message_that_is_none_is_refused() -> None:
    node = Node("topk(ratio=0.05)", 2, 2)
    node.sums(_grads(2, 0))
    codec = node.codecs[0]
    cut = Cut(list(SIZES.values()), torch.zeros(sum(SIZES.values())), codec.nodes)
    message = Message(codec, Layout(codec, _parameters(SIZES), cut), 0, 1.0, READY)
    with pytest.raises(GpuCodecError, match="expected a topk frame"):
        message.add(cut, torch.full((message.expected,), 255, dtype=torch.uint8))


# --------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_saved_goes_on_to_the_bit(spec: str) -> None:
    node = Node(spec, 3, 2)
    for step in range(3):
        node.sums(_grads(3, step))
        node.settle()
    again = Node(spec, 3, 2, [("first", "bias"), ("second", "kept")])
    for rank, (old, new) in enumerate(zip(node.codecs, again.codecs, strict=True)):
        state = node_states.write(rank, "ddp.0", old.held())
        assert set(node_states.read(state, rank)) == {"ddp.0"} and not node_states.read(state, rank + 1)
        held = node_states.read(state, rank)["ddp.0"]
        assert new.why_not(held) == ""
        new.origin = b""
        new.take(held, torch.device("cpu"))
        assert (new.steps, new.origin) == (3, b"o" * 16)
    for step in range(3, 5):
        grads = _grads(3, step)
        for a, b in zip(node.sums(grads), again.sums(grads), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SIZES)
        node.settle()
        again.settle()


def test_what_fits_no_more_says_why() -> None:
    node = Node("onebit", 3, 2)
    node.sums(_grads(3, 0))
    node.settle()
    held = node.codecs[0].held()
    assert "workers 0, 1, 2 in 2 shards" in Node("onebit", 3, 3).codecs[0].why_not(held)
    assert "workers 0, 1, 2 in 2 shards" in Node("onebit", 2, 2).codecs[0].why_not(held)
    assert Node("topk(ratio=0.1)", 3, 2).codecs[0].why_not(held) == "", "residuals are in units of gradients"
    assert "'fp16' never does" in Node("fp16", 3, 2).codecs[0].why_not(held)
    other = Node("onebit", 3, 2).codecs[0]
    other.elements["first"] += 2
    assert "'first' has no such part now: elements 4500..9001" in other.why_not(held)


def test_checkpoints_that_are_none() -> None:
    node = Node("onebit", 2, 2)
    node.sums(_grads(2, 0))
    node.settle()
    state = node_states.write(0, "ddp.0", node.codecs[0].held())
    key = "rank 0/ddp.0/node"
    tensor = next(k for k in state if k != key)
    for name, value, told in (
        (key, "{}", "expected the JSON text of a SavedNode"),
        (key, state[key].replace('"origin":"6f', '"origin":"6f6f'), "origin: expected 1 to 16 bytes"),
        (key, state[key].replace('"origin":"6f', '"origin":"xx'), "expected the JSON text of a SavedNode"),
        (tensor, torch.zeros(3), "expected torch.float32 of shape"),
        (tensor, None, "got NoneType"),
        (tensor, state[tensor] * math.nan, "what is saved of .* is not finite"),
    ):
        with pytest.raises(gcclient.StateMismatch, match=told):
            node_states.read(state | {name: value}, 0)
