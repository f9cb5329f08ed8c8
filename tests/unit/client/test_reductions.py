"""Horovod's names for averages and sums: arguments, domains, handles."""

from __future__ import annotations

import pytest
import torch

import gcclient
from gcproto.lane_messages import Push
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag
from tests.unit.client.fake import FakeDaemon


def _domains(daemon: FakeDaemon) -> list[tuple[str, str]]:
    return [(m.label, m.codec) for m in daemon.heard[-1] if isinstance(m, DeclareDomain)]


def _flags(daemon: FakeDaemon) -> list[int]:
    return [m.flags for lane in (0, 1) for m in daemon.pushes(lane) if isinstance(m, Push) and m.keys]


def test_average_and_op_say_what_is_done(joined: FakeDaemon) -> None:
    for more, flags in [
        ({}, int(Flag.AVERAGE)),
        ({"op": gcclient.Average}, int(Flag.AVERAGE)),
        ({"average": True}, int(Flag.AVERAGE)),
        ({"op": gcclient.Sum}, 0),
        ({"average": False}, 0),
    ]:
        before = len(_flags(joined))
        assert torch.equal(gcclient.allreduce(torch.arange(3.0), **more), torch.arange(3.0))
        assert _flags(joined)[before:] == [flags]
    for more, error, message in [
        ({"op": gcclient.Sum, "average": True}, ValueError, "either op or average"),
        ({"op": "sum"}, ValueError, r"op='sum': expected gcclient\.Average or gcclient\.Sum"),
        ({"average": "loss"}, TypeError, "average='loss'"),
        ({"name": "w", "compression": object}, TypeError, "compression=<class 'object'>"),
        ({"name": "w", "compression": "powersgd(rank=2)"}, ValueError, "whole matrices"),
    ]:
        with pytest.raises(error, match=message):
            gcclient.allreduce(torch.ones(2), **more)
    with pytest.raises(ValueError, match="average=False"):
        gcclient.allreduce(torch.ones(2, dtype=torch.int32))


def test_it_is_lossless_unless_a_codec_is_given(joined: FakeDaemon) -> None:
    ones = torch.ones(3)
    gcclient.allreduce(ones, name="loss")
    gcclient.allreduce(ones, compression=gcclient.Compression.fp16)
    assert _domains(joined) == [("exact", "none")]
    gcclient.allreduce(ones, None, "loss", compression=gcclient.Compression.fp16)
    gcclient.push_pull(ones, "loss", compression="topk(ratio=0.5)")
    gcclient.push_pull(ones, "more", compression="topk(ratio=0.5)")
    gcclient.allreduce_(ones, name="loss", compression=None)
    assert _domains(joined)[1:] == [
        ("calls with fp16", "fp16"),
        ("calls with topk(ratio=0.5)", "topk(ratio=0.5)"),
        ("calls", ""),
    ]


def test_results_go_where_the_name_says(joined: FakeDaemon) -> None:
    one, two = torch.ones(3), torch.full((2, 2), 2.0)
    assert gcclient.allreduce_(one, name="a") is one
    handle = gcclient.allreduce_async(one, name="a")
    joined.wait(lambda: gcclient.poll(handle))
    assert gcclient.synchronize(handle).data_ptr() != one.data_ptr()
    assert gcclient.synchronize(gcclient.allreduce_async_(one)).data_ptr() == one.data_ptr()
    first, second = gcclient.grouped_allreduce([one, two], name="g")
    assert torch.equal(first, one) and torch.equal(second, two) and first is not one
    assert gcclient.grouped_allreduce_(iter([one, two]), op=gcclient.Sum)[1] is two
    group = gcclient.grouped_allreduce_async([one, two], name="g")
    joined.wait(lambda: gcclient.poll(group))
    assert [t.shape for t in gcclient.synchronize(group)] == [(3,), (2, 2)]
    (again,) = gcclient.synchronize(gcclient.grouped_allreduce_async_([two]))
    assert again.data_ptr() == two.data_ptr()
