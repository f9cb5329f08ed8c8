"""DDP's buckets as MergeComp cuts them, for a model in training on the links that it trains on.

What may live here: from what daemons measured of a job to the sizes of buckets. What may not: running jobs
(``training_run``), the search (``gcserver.planner.mergecomp``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gcproto import admin_pb2, admin_pb2_grpc
from gcproto.modes import BALANCED
from gcserver.planner.auto import PARTS, Wish, compose
from gcserver.planner.profile import Profile, load
from gcserver.runtime import calibration

#: How daemons measure a job for it: its link, and what the codecs of automatic plans cost.
SETTINGS: Final = {"plan.mode": "mergecomp", "plan.quality": "fast"}
#: A job that measures may take so long, s: the first plan comes after some ten steps, dense ones.
PATIENCE: Final = 600.0


def planned(admin: admin_pb2_grpc.AdminServiceStub, job: str) -> bool:
    """Whether a daemon has made a first plan for the job, and so has measured all that goes into one."""
    answer = admin.GetPlan(admin_pb2.GetPlanRequest(job=job), timeout=30.0)
    return any(domain.HasField("forecast") for domain in answer.domains)


def measured(folder: Path, job: str) -> Profile:
    """What was kept in ``folder`` of a job by the daemon that made its plans. Raises ValueError where nothing was."""
    profiles = [load(path.read_bytes(), path.name) for path in folder.glob(f"{job}-*.json")]
    found = max(profiles, key=lambda p: (len(p.codecs), p.link.samples), default=None)
    if found is None:
        raise ValueError(f"no daemon kept a profile of {job}")
    return found


def caps(profile: Profile, codec: str, quality: str = BALANCED) -> tuple[float, ...]:
    """DDP's ``bucket_cap_mb_list`` for a job that uses ``codec`` (empty: what automatic plans of this quality choose),
    MiB. Empty where no cut is better than torch's own."""
    if codec and codec not in profile.codecs:
        profile = replace(profile, codecs={**profile.codecs, **calibration.costs([codec], None)})
    parts = frozenset({"mergecomp"}) if codec else PARTS
    return compose(profile, Wish(quality, parts, family=codec)).caps
