"""Daemons with keys, and who is kept out: unknown and removed keys, plain peers, forged frames, wrong tokens.

What may live here: what real daemons let in. What may not: single sockets (tests/unit/runtime/test_transport.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from gcproto import wire
from gcserver.keys import KeyPair
from gcserver.runtime.setup import lane_address
from tests.integration.cluster import Cluster
from tests.integration.daemon import Daemon
from tests.integration.operators import ask, reachable, series, until
from tests.integration.relay import Relay

COUNTING = "tests.integration.client_workers:counting"
WITH_TOKEN = "tests.integration.client_workers:with_token"
#: A peer that is cut off is given up after this.
LEASE = {"cluster.lease": "2s"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three daemons with keys; at first the third is on nobody's list but its own."""
    cluster = reachable(Cluster(tmp_path_factory.mktemp("keys"), nodes=3, keys=True, options=LEASE), metrics=True)
    a, b, _ = cluster.pairs.values()
    outsider = cluster.daemons[2]
    own = cluster.folder / "all"
    own.write_text(cluster.admitted.read_text())
    outsider.options["security.peers"] = str(own)
    cluster.admit(a, b)
    with cluster:
        yield cluster


def errors(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = ask(daemon, "status")["errors"]
    return found


def peers(daemon: Daemon) -> dict[str, Any]:
    return {p["name"]: p for p in ask(daemon, "peers")["peers"]}


def check_exact(outcomes: list[Any]) -> None:
    assert [o.ok()["wrong"] for o in outcomes] == [0] * len(outcomes)


def test_admitted_nodes_work_and_an_unknown_key_is_refused_and_counted(secured: Cluster) -> None:
    a, b, c = secured.daemons
    check_exact(secured.run(COUNTING, [0, 1], steps=5, elements=100_000))
    until("a refusal", lambda: errors(a).get("keys_refused", 0) >= 2)
    assert series(a)["errors_total{kind=keys_refused}"] >= 2
    assert peers(a)[b.name]["state"] == "up" and peers(a)[b.name]["encrypted"]
    assert "not in this node's security.peers" in peers(a)[c.name]["reason"]
    until("word of it", lambda: "does not admit this node's key" in peers(c)[a.name]["reason"])
    assert peers(c)[a.name]["state"] == "refused" and secured.pairs[c.name].public.decode() in a.text()


def test_a_key_comes_and_goes_without_a_restart(secured: Cluster) -> None:
    """While two nodes train: neither the newcomer nor its end costs them a bit."""
    a, b, c = secured.daemons
    pa, pb, pc = secured.pairs.values()
    job = secured.start(COUNTING, [0, 1], steps=10_000, elements=50_000)
    job.wait_mark("step 5")
    secured.admit(pa, pb, pc)
    until("the newcomer", lambda: all(p["state"] == "up" for d in (a, b, c) for p in peers(d).values()))
    check_exact(secured.run(COUNTING, [0, 1, 2], steps=5, elements=100_000))
    cut = secured.start(COUNTING, [0, 2], steps=100_000, elements=1000)
    cut.wait_mark("step 5")
    secured.admit(pa, pb)
    lost = cut.wait(60)
    assert {o.error for o in lost} == {"PeerLost"}
    # At once where the key was taken out; by its lease where nobody has told of that.
    assert f"the key of {c.name} is no longer in security.peers of {a.name}" in lost[0].message
    assert a.name in lost[1].message and "lease" in lost[1].message
    assert errors(a)["nodes_expelled"] == 1 and series(a)["errors_total{kind=nodes_expelled}"] == 1
    assert "no longer admitted: " + c.name in a.text()
    before = errors(a)["keys_refused"]
    until("more refusals", lambda: errors(a)["keys_refused"] > before)
    done = len(job.workers[0].marks())
    until("steps after that", lambda: len(job.workers[0].marks()) > done + 20)
    job.kill()
    assert all("step" in mark for mark in job.workers[1].marks())
    assert a.lives == b.lives == c.lives == 1


Parts = tuple[bytes, bytes]


def speak(address: str, messages: Sequence[Parts], pair: KeyPair | None = None, server: bytes = b"") -> None:
    """Send what a peer could send, as the owner of ``pair``; returns when all has left."""
    context: zmq.Context[Any] = zmq.Context()
    out = context.socket(zmq.PUSH)
    if pair is not None:
        out.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        out.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        out.setsockopt(zmq.CURVE_SERVERKEY, server)
    out.connect(address)
    for header, payload in messages:
        out.send_multipart([header, payload] if payload else [header])
    context.destroy(10_000)


def turned_away(address: str) -> bool:
    """Whether who connects without a key is hung up on."""
    context: zmq.Context[Any] = zmq.Context()
    out = context.socket(zmq.PUSH)
    monitor = out.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    out.connect(address)
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little") if monitor.poll(10_000) else 0
    context.destroy(0)
    return event == zmq.EVENT_DISCONNECTED


def test_a_peer_without_keys_is_refused_and_counted(secured: Cluster) -> None:
    a = secured.daemons[0]
    before = errors(a).get("handshakes_failed", 0)
    for lane in (0, 1):  # the control link is the port after the lane
        assert turned_away(lane_address(a.address, lane))
    until("both counted", lambda: errors(a).get("handshakes_failed", 0) >= before + 2)


def test_an_admitted_node_cannot_speak_in_anothers_name(secured: Cluster) -> None:
    a, b, _ = secured.daemons
    before = errors(a).get("frames_forged", 0)
    heartbeat = wire.Header(wire.FrameType.HEARTBEAT, sender=wire.node_id(a.name), incarnation=1 << 62)
    for lane in (0, 1):
        own = secured.pairs[a.name].public
        speak(lane_address(a.address, lane), [(wire.pack(heartbeat), b"")], secured.pairs[b.name], own)
    until("both counted", lambda: errors(a).get("frames_forged", 0) == before + 2)


def test_frames_replayed_and_forged_change_nothing_and_are_counted(tmp_path: Path) -> None:
    """On a link without keys, where anybody can send: numbers and digests still keep out what was recorded."""
    cluster = reachable(Cluster(tmp_path, nodes=2))
    a, b = cluster.daemons
    with Relay(b.address, ports=2) as relay:
        a.options["cluster.peers"] = f"{b.name}={relay.address}"
        b.options["node.advertise"] = relay.address
        with cluster:
            job = cluster.start(COUNTING, [0, 1], steps=150, elements=50_000, pause=0.02)
            job.wait_mark("step 20")
            recorded = [f for f in relay.frames(0) if wire.parse(f[0]).type is wire.FrameType.DATA][-20:]
            damaged = [(h, p[:-1] + bytes([p[-1] ^ 1])) for h, p in recorded if p]
            # Few: of a link on which nothing but rubbish arrives the lane thinks ill.
            changed = [(h[:40] + bytes([h[40] ^ 1]) + h[41:], p) for h, p in recorded[:3]]
            assert len(recorded) == 20 and damaged
            speak(b.address, recorded + damaged + changed)
            check_exact(job.wait(90))
            until("replays", lambda: errors(b).get("frames_duplicate", 0) >= len(recorded))
            until("forgeries", lambda: errors(b).get("frames_corrupt", 0) >= len(damaged) + len(changed))


def test_a_wrong_token_is_refused_and_counted(tmp_path: Path) -> None:
    with reachable(Cluster(tmp_path, nodes=2)) as cluster:
        same = cluster.run(WITH_TOKEN, [0, 1], job="ours", tokens=["right", "right"])
        assert [o.ok()["error"] for o in same] == ["", ""]
        first, second = (o.ok() for o in cluster.run(WITH_TOKEN, [0, 1], job="ours", tokens=["right", "wrong"]))
        assert (first["error"], second["error"]) == ("StepTimeout", "NotAuthorised")
        assert "'ours'" in second["message"] and "GC_JOB_TOKEN" in second["message"]
        assert errors(cluster.daemons[0])["tokens_refused"] == 1


def test_a_job_of_nodes_with_and_without_keys_is_refused(tmp_path: Path) -> None:
    """They meet in torch's store, where each says which key its daemon has."""
    cluster = Cluster(tmp_path, nodes=2, keys=True, know_peers=False)
    plain = cluster.daemons[1]
    del plain.options["security.key"], plain.options["security.peers"]
    with cluster:
        outcomes = cluster.run("tests.integration.ddp_workers:training", [0, 1], steps=1, compressions=["none"])
        assert {o.error for o in outcomes} == {"NotAuthorised"}
        assert "runs without keys" in outcomes[0].message and "runs with keys" in outcomes[1].message
