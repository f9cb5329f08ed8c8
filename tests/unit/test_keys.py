"""Files of keys: what keygen writes, what is read back, what is refused and named."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from gcserver import keys
from gcserver.keys import KeyFileError
from tests.unit.key_pairs import fixed_pair


def test_a_pair_is_written_and_read_back(tmp_path: Path) -> None:
    pair = keys.generate("node-1")
    secret, public = keys.write(pair, tmp_path / "new")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys.exposed(secret) == ""
    assert keys.read_pair(secret) == pair
    assert keys.read_admitted(public) == {"node-1": pair.public}
    assert zmq.curve_public(pair.secret) == pair.public
    assert pair.secret.decode() not in repr(pair)
    assert pair.secret.decode() not in public.read_text()


def test_the_mode_of_a_secret_key_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret, _ = keys.write(keys.generate("a"), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize("kept", ["a.key", "a.pub"])
def test_keys_are_not_overwritten(tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).write_text("old")
    with pytest.raises(FileExistsError, match=kept):
        keys.write(keys.generate("a"), tmp_path)
    assert (tmp_path / kept).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [kept]


def test_a_name_that_is_none_gets_no_keys() -> None:
    with pytest.raises(ValueError, match="letters"):
        keys.generate("../a")


def test_a_list_is_what_cat_makes_of_public_keys(tmp_path: Path) -> None:
    pairs = [keys.generate(name) for name in ("a", "b", "c")]
    for pair in pairs:
        keys.write(pair, tmp_path)
    text = "# ours\n\n" + "".join(path.read_text() for path in sorted(tmp_path.glob("*.pub")))
    (tmp_path / "peers").write_text(text + keys.line("a", pairs[0].public) + "\n")
    assert keys.read_admitted(tmp_path / "peers") == {pair.name: pair.public for pair in pairs}


ONE = fixed_pair("one")
OTHER = fixed_pair("other")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n", ":1: expected NAME KEY"),
        ("# x\na short\n", ":2: expected NAME KEY"),
        (f"a {'#' * 40}\n", ":1: expected NAME KEY"),
        (f"a {ONE.public.decode()} extra\n", ":1: expected NAME KEY"),
        (f"-a {ONE.public.decode()}\n", "'-a' is no node's name"),
        (f"{keys.SECRET} a {ONE.secret.decode()}\n", ":1 is a secret key"),
        (f"a {ONE.public.decode()}\na {OTHER.public.decode()}\n", ":2: a has another key"),
        (f"a {ONE.public.decode()}\nb {ONE.public.decode()}\n", ":2: a has the same key"),
        ("é\n", "not ASCII"),
        ("#" * (keys.MAX_FILE_BYTES + 1), "more than"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "peers"
    path.write_text(text)
    with pytest.raises(KeyFileError) as caught:
        keys.read_admitted(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert ONE.secret.decode() not in str(caught.value)


@pytest.mark.parametrize("text", ["", f"a {ONE.public.decode()}\n", f"{keys.SECRET} a short\n", "x\ny\n"])
def test_a_secret_key_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.key"
    path.write_text(text)
    with pytest.raises(KeyFileError, match="gcserver keygen"):
        keys.read_pair(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(KeyFileError, match=str(path)):
            keys.read_admitted(path)


def test_a_key_that_others_may_read_is_exposed(tmp_path: Path) -> None:
    secret, _ = keys.write(ONE, tmp_path)
    secret.chmod(0o640)
    assert keys.exposed(secret) == ""
    for mode in (0o644, 0o660, 0o601):
        secret.chmod(mode)
        assert f"{mode:04o}" in keys.exposed(secret)


def test_a_new_list_counts_once_it_rests(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    first, second = keys.line("a", ONE.public) + "\n", keys.line("b", OTHER.public) + "\n"
    path.write_text(first)
    watch = keys.Watch(path)
    assert not watch.changed() and watch.admitted == {"a": ONE.public}
    path.write_text(first + second[:-3])
    assert not watch.changed(), "it may still be being written"
    path.write_text(first + second)
    assert not watch.changed()
    assert watch.changed() and watch.admitted == {"a": ONE.public, "b": OTHER.public}
    assert not watch.changed()


def test_a_list_that_lacks_a_node_counts_only_once_it_rested_for_longer(tmp_path: Path) -> None:
    """What is written in place is empty first, for seconds where the disk is busy; jobs would have lost everybody."""
    path = tmp_path / "peers"
    both = keys.line("a", ONE.public) + "\n" + keys.line("b", OTHER.public) + "\n"
    path.write_text(both)
    watch = keys.Watch(path)
    path.write_text("")
    assert not any(watch.changed() for _ in range(keys.LOOKS_TO_LOSE - 1))
    path.write_text(both)
    assert not any(watch.changed() for _ in range(2 * keys.LOOKS_TO_LOSE)), "it is what it was"
    assert watch.admitted == {"a": ONE.public, "b": OTHER.public}
    path.write_text(both[both.index("b ") :])
    assert not any(watch.changed() for _ in range(keys.LOOKS_TO_LOSE - 1))
    assert watch.changed() and watch.admitted == {"b": OTHER.public}
    path.write_text("")
    assert watch.changed(asked=True) and watch.admitted == {}, "who asks has written it"


def test_a_list_that_went_bad_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text(keys.line("a", ONE.public) + "\n")
    watch = keys.Watch(path)
    path.unlink()
    assert not watch.changed()
    with pytest.raises(KeyFileError):
        watch.changed()
    assert not watch.changed() and watch.admitted == {"a": ONE.public}
    path.write_text(keys.line("a", OTHER.public) + "\n")
    assert not watch.changed()
    assert watch.changed() and watch.admitted == {"a": OTHER.public}


def test_a_list_replaced_by_the_same_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text(keys.line("a", ONE.public) + "\n")
    watch = keys.Watch(path)
    (tmp_path / "new").write_text("# again\n" + keys.line("a", ONE.public) + "\n")
    (tmp_path / "new").replace(path)
    assert not watch.changed() and not watch.changed()
