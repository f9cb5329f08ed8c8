"""Daemons published through torch's store: real stores, in one process."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from gcclient import rendezvous
from gcclient.errors import JoinRefused, StepTimeout
from gcclient.rendezvous import Place, digest, draw, introduce, local_part, meet, peers

A, B = Place("a", "tcp://10.0.0.1:1"), Place("b", "tcp://10.0.0.2:1")


def test_every_rank_learns_all_places() -> None:
    store = dist.HashStore()
    got: dict[int, tuple[Place, ...]] = {}

    def rank(r: int) -> None:
        got[r] = meet(store, "k", r, 3, (A, B, A)[r], 10)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(3), (A, B, A))


def test_what_another_release_publishes_may_lack_what_is_new() -> None:
    store = dist.HashStore()
    store.set("k/1", '{"node": "b", "address": "tcp://10.0.0.2:1"}')
    assert meet(store, "k", 0, 2, A, 10) == (A, B)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from datetime import timedelta

    monkeypatch.setattr(rendezvous, "_SAY_EVERY", timedelta(seconds=0.05))
    store = dist.HashStore()
    with pytest.raises(StepTimeout, match="rank 1") as caught:
        meet(store, "k", 0, 2, A, 0.2)
    assert caught.value.missing == ("rank 1",) and caught.value.phase == "join"
    assert "waiting for rank 1" in caplog.text


def test_the_agents_store_is_given_as_long_as_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    asked: list[float] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *place, timeout, **more: asked.append(timeout.total_seconds()))
    rendezvous.find_store(77.0)
    assert asked == [77.0]


def test_ranks_are_local_by_daemon_and_not_by_variable() -> None:
    places = (A, B, A, A, B)
    assert [local_part(places, r) for r in range(5)] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_peers_are_the_other_nodes_once() -> None:
    assert peers((A, B, A, B), 0) == (("b", B.address),)
    with pytest.raises(JoinRefused, match="two daemons are called 'a'"):
        peers((A, Place("a", "tcp://10.0.0.9:1")), 0)


def test_a_second_init_uses_other_keys() -> None:
    assert rendezvous.prefix("job") != rendezvous.prefix("job")


def test_keys_and_token_travel_with_the_places() -> None:
    store, places = dist.HashStore(), (replace(A, key="ka", token="drawn"), replace(B, key="kb"))
    threads = [threading.Thread(target=meet, args=(store, "k", r, 2, places[r], 10)) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meet(store, "k", 0, 2, places[0], 10) == places


def test_a_worker_introduces_the_other_nodes_with_their_keys() -> None:
    places = (replace(A, key="ka", token="drawn"), replace(B, key="kb"), replace(A, key="ka"))
    first, second = introduce(places, 0, ""), introduce(places, 1, "")
    assert first.peers == (("b", B.address),) and first.keys == (("b", "kb"),)
    assert second.peers == (("a", A.address),) and second.keys == (("a", "ka"),)
    assert first.token == second.token == digest("drawn") and len(first.token) == 32


def test_a_token_that_was_given_goes_before_one_that_was_drawn() -> None:
    places = (replace(A, token="drawn"), B)
    assert introduce(places, 1, "given").token == digest("given") != digest("drawn")


def test_rank_0_draws_a_token_where_none_is_given() -> None:
    assert draw(0, "") != draw(0, "") and len(draw(0, "")) == 32
    assert draw(1, "") == draw(0, "given") == ""
    assert digest("") == b""


def test_a_loopback_address_of_another_machine_is_refused() -> None:
    here = rendezvous.machine()
    assert here and here == rendezvous.machine()
    for address in ("tcp://127.0.0.1:7470", "tcp://localhost:7470", "tcp://[::1]:7470"):
        mine, theirs = Place("a", "tcp://10.0.0.1:7470", machine=here), Place("b", address, machine="another")
        with pytest.raises(JoinRefused, match=r"'b' of rank 1 is on another machine.*GC_NODE_LISTEN"):
            rendezvous.peers((mine, theirs), 0)
        near = Place("b", address, machine=here)
        assert rendezvous.peers((mine, near), 0) == (("b", address),)
        assert rendezvous.peers((mine, Place("b", address)), 0) == (("b", address),), "another release does not say"
    far = Place("b", "tcp://node7:7470", machine="another")
    assert rendezvous.peers((Place("a", "tcp://10.0.0.1:7470", machine=here), far), 0) == (("b", far.address),)
