"""What people write is read, what we write can be read back, and a refusal says what would be accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver import values
from gcserver.values import Address


@pytest.mark.parametrize(
    ("raw", "size"),
    [(0, 0), (4096, 4096), ("65536", 65536), ("64KiB", 65536), ("64 kb", 65536), ("64K", 65536), ("4MiB", 4 << 20),
     ("1.5MiB", 3 << 19), ("2GiB", 2 << 30), ("1TiB", 1 << 40), ("7B", 7)],
)  # fmt: skip
def test_sizes(raw: object, size: int) -> None:
    assert values.read_size(raw) == size


@pytest.mark.parametrize("raw", ["", "4 Mi B", "-1", "1e3", "four", "0.3KiB", "4Q", True, None, 1.5, [4]])
def test_no_sizes(raw: object) -> None:
    with pytest.raises(ValueError, match="4MiB"):
        values.read_size(raw)


@given(st.integers(0, 1 << 60))
def test_a_size_shown_is_read_back(size: int) -> None:
    assert values.read_size(values.show_size(size)) == size


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [(30, 30.0), (0.5, 0.5), ("30", 30.0), ("30s", 30.0), ("500ms", 0.5), ("5m", 300.0), ("5 min", 300.0),
     ("1h", 3600.0), ("2d", 172800.0)],
)  # fmt: skip
def test_durations(raw: object, seconds: float) -> None:
    assert values.read_duration(raw) == seconds


@pytest.mark.parametrize("raw", ["", "s", "-1s", "1 fortnight", "nan", "inf", "9" * 400, float("nan"), -1, True, None])
def test_no_durations(raw: object) -> None:
    with pytest.raises(ValueError, match="500ms"):
        values.read_duration(raw)


@given(st.floats(0, 1e9, allow_nan=False))
def test_a_duration_shown_is_read_back(seconds: float) -> None:
    assert values.read_duration(values.show_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("raw", "host", "port"),
    [("tcp://10.0.0.7:7470", "10.0.0.7", 7470), ("tcp://[::1]:1", "::1", 1), ("tcp://*:7470", "0.0.0.0", 7470),
     ("tcp://node-3.rack_1.example:65535", "node-3.rack_1.example", 65535)],
)  # fmt: skip
def test_addresses(raw: str, host: str, port: int) -> None:
    address = values.read_tcp(raw)
    assert (address.host, address.port) == (host, port)
    assert values.read_tcp(str(address)) == address


@pytest.mark.parametrize(
    "raw",
    ["", "tcp://", "host:1", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://::1:7470",
     "tcp://[host]:1", "tcp://a b:1", "udp://host:1", "tcp://host:١", 7470, None],
)  # fmt: skip
def test_no_addresses(raw: object) -> None:
    with pytest.raises(ValueError, match="expected tcp://host:port"):
        values.read_tcp(raw)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("some-host", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 1).loopback is loopback


def test_addresses_overlap() -> None:
    assert Address("127.0.0.1", 1).overlaps(Address("127.0.0.1", 1))
    assert Address("0.0.0.0", 1).overlaps(Address("127.0.0.1", 1))
    assert not Address("127.0.0.1", 1).overlaps(Address("127.0.0.2", 1))
    assert not Address("0.0.0.0", 1).overlaps(Address("0.0.0.0", 2))


@pytest.mark.parametrize(
    ("raw", "cores"),
    [
        ("auto", None),
        ([2, 0, 2], (0, 2)),
        ("0-3,6", (0, 1, 2, 3, 6)),
        ("5", (5,)),
        ("1, 3-3", (1, 3)),
        ("[0, 2]", (0, 2)),
    ],
)
def test_cores(raw: object, cores: tuple[int, ...] | None) -> None:
    assert values.read_cores(raw) == cores


@pytest.mark.parametrize("raw", ["", "all", "3-1", "-1", [], [-1], ["0"], [True], 0, "0-99999999999"])
def test_no_cores(raw: object) -> None:
    with pytest.raises(ValueError, match="auto"):
        values.read_cores(raw)


@pytest.mark.parametrize(
    ("raw", "items"),
    [
        (["a", " b "], ["a", "b"]),
        ("a, b", ["a", "b"]),
        ('["*.bias", "head.*"]', ["*.bias", "head.*"]),
        ("[ab]*,[0]x", ["[ab]*", "[0]x"]),  # globs
        ("[]", []),
        ("", []),
    ],
)
def test_lists_are_read_as_a_file_and_as_a_flag_write_them(raw: object, items: list[str]) -> None:
    assert values.read_list(raw, "a list") == items


@pytest.mark.parametrize("raw", [3, [3], [""], "[1]", None])
def test_no_lists(raw: object) -> None:
    with pytest.raises(ValueError, match="expected names"):
        values.read_list(raw, "names")


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cores_shown_are_read_back(cores: set[int]) -> None:
    ordered = tuple(sorted(cores))
    assert values.read_cores(values.show_cores(ordered)) == ordered


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 µs"), (0.012, "12 ms"), (4.25, "4.25 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h"),
     (120, "2 min"), (float("inf"), "inf s"), (float("nan"), "nan s")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert values.human_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (3 << 40, "3 TiB"), (1 << 60, "1048576 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert values.human_size(size) == text
