"""What the dashboard shows at a glance, from two looks at a daemon."""

from __future__ import annotations

import json
from dataclasses import replace

from gcserver.admin.overview import Change, Look, changes, overview, recent
from gcserver.admin.source import JobState, NodeState, PeerState, PeerStatus
from tests.unit.admin.source import JOB, NODE, PEERS

FIRST = Look(100.0, 1.7e9, NODE, tuple(PEERS), (JOB,))


def later(seconds: float = 2.0, **changed: object) -> Look:
    return replace(FIRST, at=FIRST.at + seconds, date=FIRST.date + seconds, **changed)  # type: ignore[arg-type]


def moved(peer: PeerStatus, more_in: int, more_out: int) -> PeerStatus:
    return replace(peer, bytes_in=peer.bytes_in + more_in, bytes_out=peer.bytes_out + more_out)


def told(before: Look, now: Look) -> list[tuple[bool, str]]:
    return [(c.bad, c.text) for c in changes(before, now)]


def test_a_first_look_has_no_rates() -> None:
    shown = overview(FIRST, None, ())
    assert shown["node"]["name"] == "a" and shown["node"]["state"] == "serving"
    assert [(link["peer"], link["state"], link["rate_in"]) for link in shown["links"]] == [
        ("b", "up", None), ("c", "refused", None),
    ]  # fmt: skip
    (job,) = shown["jobs"]
    assert (job["label"], job["step"], job["steps_rate"], job["ranks"]) == ("gpt", 41, None, 3)
    assert job["members"] == [{"node": "a", "ranks": 2}, {"node": "b", "ranks": 1}]
    assert job["waits"] == [{"for": "b", "wanted": "aggregate", "step": 42, "seconds": 3.5, "domain": "world"}]
    assert shown["faults"] == {
        "counts": [
            {
                "kind": "frames_corrupt",
                "count": 2,
                "about": "frames that were damaged on their way, and asked for again",
            }
        ],
        "changes": [],
    }
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_rates_come_of_two_looks() -> None:
    now = later(peers=(moved(PEERS[0], 1000, 4000), PEERS[1]), jobs=(replace(JOB, step=51),))
    shown = overview(now, FIRST, [Change(1.0, True, "x")])
    assert [(link["rate_in"], link["rate_out"]) for link in shown["links"]] == [(500.0, 2000.0), (0.0, 0.0)]
    assert shown["jobs"][0]["steps_rate"] == 5.0
    assert shown["faults"]["changes"] == [{"date": 1.0, "bad": True, "text": "x"}]


def test_looks_that_say_nothing_of_each_other_give_no_rates() -> None:
    fewer = overview(later(peers=(moved(PEERS[0], -5, -5), PEERS[1]), jobs=(replace(JOB, step=3),)), FIRST, ())
    assert fewer["links"][0]["rate_in"] is None and fewer["jobs"][0]["steps_rate"] is None
    assert recent(FIRST, later()) is FIRST
    assert recent(FIRST, later(60.0)) is recent(None, FIRST) is None


def test_nothing_happens_between_looks_that_are_alike() -> None:
    assert changes(FIRST, later()) == []


def test_what_happens_to_node_lanes_and_links_is_told() -> None:
    lane = replace(NODE.lanes[0], state="silent", restarts=2)
    node = replace(
        NODE, state=NodeState.DEGRADED, reason="lane 0 is silent", errors={"frames_corrupt": 5, "keys_refused": 1},
        lanes=(lane,),
    )  # fmt: skip
    peers = (
        replace(PEERS[0], state=PeerState.DEAD, reason="nothing heard"),
        PEERS[1],
        PeerStatus("d", "", PeerState.UP),
    )
    assert told(FIRST, later(node=node, peers=peers)) == [
        (True, "this node is degraded: lane 0 is silent"),
        (True, "lane 0 died and was started again"),
        (True, "link to b is dead: nothing heard"),
        (False, "link to d is up"),
        (True, "frames_corrupt: 3 more"),
        (True, "keys_refused: 1 more"),
    ]
    quiet = replace(NODE, lanes=(replace(lane, restarts=1),))
    assert told(FIRST, later(node=quiet)) == [(True, "lane 0 is silent")]
    assert told(later(node=quiet), later(4.0)) == [(False, "lane 0 is ready")]


def test_what_happens_to_jobs_is_told() -> None:
    domain = replace(JOB.domains[0], steps_void=3)
    now = replace(JOB, state=JobState.RECOVERING, reason="workers", epoch=2, plan_version=3, domains=(domain,))
    assert told(FIRST, later(jobs=(now,))) == [
        (True, "job gpt is recovering: workers"),
        (True, "job gpt is in epoch 2: its members changed"),
        (False, "job gpt has plan 3"),
        (True, "job gpt: 2 void steps, gradients were not finite"),
    ]
    joining = replace(JOB, id="", label="bert", state=JobState.JOINING)
    new = replace(JOB, id="ff" * 16, label="bert")
    assert told(FIRST, later(jobs=(joining,))) == [(False, "job gpt has left")]
    assert told(FIRST, later(jobs=(JOB, new))) == [(False, "job bert has begun, with 3 ranks")]
