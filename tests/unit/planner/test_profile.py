"""The profile: curves between and beyond their points, JSON there and back, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from gcserver.planner.profile import (
    CodecCost,
    Curve,
    LevelErrors,
    LinkCost,
    Profile,
    ProfiledTensor,
    ProfileError,
    StepTime,
    dump,
    load,
)

LINE = Curve(((1000, 1e-3), (3000, 2e-3)))


def a_profile() -> Profile:
    tensors = (ProfiledTensor("b", (10,), 10, "float32", 0.0), ProfiledTensor("a", (2, 3), 6, "float32", 0.25))
    cost = CodecCost(LINE, LINE, LINE, 0.02)
    errors = {"topk": (LevelErrors("a", (1, 10), (0.5, 0.25), (8.0, 16.0)),)}
    return Profile(
        "job", "ddp.0", 2, 1, 1, 0.5, tensors, LinkCost(1e-4, 1e8), 8 << 20, 64 << 10,
        codecs={"topk(ratio=0.01)": cost}, errors=errors, steps=(StepTime(1, 0.5, 0.1, 20),),
        buckets=(40, 24), tolerant=True,
    )  # fmt: skip


@pytest.mark.parametrize(("elements", "seconds"), [(0, 1e-3), (1000, 1e-3), (2000, 1.5e-3), (3000, 2e-3), (5000, 3e-3)])
def test_a_curve_is_flat_below_linear_between_and_goes_on_beyond(elements: int, seconds: float) -> None:
    assert LINE(elements) == pytest.approx(seconds)


def test_a_curve_that_falls_at_its_end_stays_level_beyond() -> None:
    assert Curve(((1, 2.0), (2, 1.0)))(10) == 1.0


@pytest.mark.parametrize("points", [(), ((2, 1.0), (2, 1.0)), ((1, -1.0),), ((1, float("nan")),), ((-1, 0.0),)])
def test_points_that_are_no_curve_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ProfileError):
        Curve(points)


def test_a_profile_survives_json() -> None:
    assert load(dump(a_profile()), "f") == a_profile()


@pytest.mark.parametrize("spec", ["Fp16", "fp16)", "qsgd(bits=many)", "qsgd(bits=1e300)", "topk(ratio=2)", ""])
def test_costs_of_what_is_no_codec_are_refused(spec: str) -> None:
    cost = CodecCost(Curve(((1, 0.1),)), Curve(((1, 0.1),)), Curve(((1, 0.1),)), 0.5)
    broken = msgspec.structs.replace(a_profile(), codecs={"fp16": cost, spec: cost})
    with pytest.raises(ProfileError, match="f is no profile: codecs"):
        load(dump(broken), "f")
    known = msgspec.structs.replace(a_profile(), codecs={"fp16": cost, "sidco-e(ratio=0.01,packed=1)": cost})
    assert load(dump(known), "f") == known


def test_computing_takes_forward_and_backward() -> None:
    profile = a_profile()
    assert (profile.elements, profile.backward, profile.compute) == (16, 0.25, 0.75)


@pytest.mark.parametrize(
    "text", [b"{}", b"[", b'{"job":"\xff"}', dump(a_profile()).replace(b'"nodes":2', b'"nodes":"two"')]
)
def test_what_is_no_profile_names_the_file(text: bytes) -> None:
    with pytest.raises(ProfileError, match="f is no profile"):
        load(text, "f")


def test_another_form_is_to_be_measured_anew() -> None:
    with pytest.raises(ProfileError, match="measured anew"):
        load(msgspec.json.encode(msgspec.structs.replace(a_profile(), form=99)), "f")


@pytest.mark.parametrize(
    ("found", "instead", "named"),
    [
        (b'"forward":0.5', b'"forward":-0.5', "forward"),
        (b'"bandwidth":100000000.0', b'"bandwidth":0.0', "link.bandwidth"),
        (b'"latency":0.0001', b'"latency":-1', "link.latency"),
        (b'"copy":4000000000.0', b'"copy":0', "copy"),
        (b'"round_seconds":0.0005', b'"round_seconds":-1', "round_seconds"),
        (b'"busy":1.0', b'"busy":0', "busy"),
        (b'"lanes":1', b'"lanes":0', "lanes"),
        (b'"partition_bytes":', b'"partition_bytes":-', "partition_bytes"),
        (b'"min_compress_bytes":', b'"min_compress_bytes":-', "min_compress_bytes"),
        (b'"ratio":0.02', b'"ratio":-0.02', "ratio"),
        (b'"ready":0.25', b'"ready":-0.25', "'a'.ready"),
        (b'"elements":6', b'"elements":-6', "'a'.elements"),
        (b'"seconds":0.5', b'"seconds":-1', "steps"),
        (b'"buckets":[40,24]', b'"buckets":[40,0]', "buckets"),
        (b'"errors":[0.5,0.25]', b'"errors":[0.5]', "errors"),
        (b'"levels":[1,10]', b'"levels":[10,10]', "errors"),
        (b'"sizes":[8.0,16.0]', b'"sizes":[-8.0,16.0]', "errors"),
        (b'"elements":6', b'"elements":1' + 30 * b"0", "64 bits"),
        (b'"samples":0', b'"samples":1' + 30 * b"0", "64 bits"),
        (b'"topk(ratio=0.01)"', b'"topk(ratio=1e305)"', "codecs: 'topk.ratio=1e305.'"),
    ],
)
def test_figures_that_nobody_can_have_measured_are_refused(found: bytes, instead: bytes, named: str) -> None:
    text = dump(a_profile())
    assert found in text
    with pytest.raises(ProfileError, match=f"f is no profile: .*{named}"):
        load(text.replace(found, instead), "f")
