"""The file of contexts: what may be in it, where it is looked for, who may write it, and how one becomes current.

What may live here: tests of `gcserver/admin/contexts.py`. What may not: what a call uses of it
(`test_gcctl_settings.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gcserver.admin import contexts
from gcserver.admin.contexts import Context, ContextError, Contexts
from gcserver.admin.exits import Exit

WHOLE = """\
# whoever reads this
current = "lab"  # for now

[contexts.lab]
address = "a.cluster:7460"
tls_ca = "~/ca.pem"
tls_cert = "/etc/alice.pem"
tls_key = "/etc/alice.key"
timeout = "2m"
job = "gpt"

[contexts."b.test"]
address = "unix:/run/gradcomm/admin.sock"
"""
LAB = Context("lab", "a.cluster:7460", "~/ca.pem", "/etc/alice.pem", "/etc/alice.key", 120.0, "gpt")
B = Context("b.test", "unix:/run/gradcomm/admin.sock")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "contexts.toml"
    path.write_text(WHOLE)
    path.chmod(0o600)
    return path


def load(file: Path) -> Contexts:
    return contexts.load({"GCCTL_CONFIG": str(file)})


def test_the_whole_of_it(file: Path) -> None:
    assert load(file) == Contexts(file, "lab", {"lab": LAB, "b.test": B})


def test_where_it_is_looked_for() -> None:
    def place(**environ: str) -> str:
        return str(contexts.place(environ))

    assert place(HOME="/home/alice") == "/home/alice/.config/gradcomm/contexts.toml"
    assert place(HOME="/home/alice", XDG_CONFIG_HOME="/etc/xdg") == "/etc/xdg/gradcomm/contexts.toml"
    assert place(HOME="/home/alice", XDG_CONFIG_HOME="relative") == "/home/alice/.config/gradcomm/contexts.toml"
    assert place(HOME="/home/alice", XDG_CONFIG_HOME="/etc/xdg", GCCTL_CONFIG="/my.toml") == "/my.toml"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert contexts.load({"HOME": str(tmp_path)}).known == {}
    (tmp_path / ".config").write_text("no folder")
    assert contexts.load({"HOME": str(tmp_path)}).known == {}, "cannot be there"
    with pytest.raises(ContextError, match=r"GCCTL_CONFIG: .*none.toml is not there; write it") as caught:
        load(tmp_path / "none.toml")
    assert caught.value.status is Exit.USAGE


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("current = ", "expected TOML, got: "),
        ('colour = "red"', "colour: expected current and tables [contexts.NAME]"),
        ("contexts = 3", "contexts: expected tables [contexts.NAME], got int"),
        ('current = "lab"', "current: expected the name of a context (there are: none), got 'lab'"),
        ("current = 3\n[contexts.a]", "current: expected the name of a context (there are: a), got 3"),
        ("[contexts]\nlab = 3", "contexts.lab: expected a table, got int"),
        ("[contexts.none]", "contexts.none: expected a name of 1 to 64 letters"),
        ('[contexts."a b"]', "contexts.a b: expected a name of"),
        ('[contexts.lab]\nadress = "a:1"', "contexts.lab.adress: unknown key; did you mean address?"),
        ('[contexts.lab]\nzzz = "a:1"', "contexts.lab.zzz: unknown key; expected one of address, tls_ca"),
        ("[contexts.lab]\naddress = 7460", "contexts.lab.address: expected a text, got 7460"),
        ('[contexts.lab]\njob = ""', "contexts.lab.job: expected a text, got ''"),
        ('[contexts.lab]\naddress = "a"', "contexts.lab.address: expected host:port or unix:/path"),
        ('[contexts.lab]\ntimeout = "soon"', "contexts.lab.timeout: expected"),
        ('[contexts.lab]\ntimeout = "0s"', "contexts.lab.timeout: expected more than 0 s"),
        (f'[contexts.lab]\ntimeout = "{"9" * 400}"', "contexts.lab.timeout: expected"),
        ("current = " + "9" * 5000, "expected TOML, got: Exceeds the limit"),
        ("[contexts]\na = " + "[" * 5000, "expected TOML, got: "),
        (
            '[contexts.lab]\ntls_ca = "a"\ntls_key = "b"',
            "contexts.lab: expected tls_ca, tls_cert and tls_key or none of them, got tls_ca and tls_key",
        ),
    ],
)
def test_what_is_wrong_names_file_and_key(file: Path, text: str, part: str) -> None:
    file.write_text(text)
    with pytest.raises(ContextError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: ") and part in str(caught.value)


def test_a_file_that_cannot_be_read(file: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(ContextError, match="cannot be read: it is not UTF-8"):
        load(file)
    with pytest.raises(ContextError, match="cannot be read: Is a directory"):
        load(file.parent)


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix://", "unix:/" + "a" * 107, "unix:/a\0b", "unix:/\udcff", "a", "a:0", "a:65536", "http://a:1"],
)
def test_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        contexts.read_address(text)


def test_addresses() -> None:
    for text in ("unix:/run/gradcomm/a/admin.sock", "unix:///tmp/é", "unix:here.sock", "a:1", "[::1]:7460"):
        assert contexts.read_address(text) == text


def test_a_file_without_end() -> None:
    with pytest.raises(ContextError, match="/dev/zero has more than 1048576 bytes"):
        load(Path("/dev/zero"))


def test_a_link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(ContextError, match="is not there"):
        load(file)
    contexts.use(Contexts(file), "none")
    with pytest.raises(ContextError, match="no context 'lab'"):
        contexts.use(Contexts(file), "lab")


def test_a_name_that_is_not_there(file: Path) -> None:
    with pytest.raises(ContextError, match="no context 'labs'; did you mean 'lab'"):
        load(file).get("labs")
    with pytest.raises(ContextError, match=r"no context 'prod'; there are: lab, b\.test"):
        load(file).get("prod")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_names_keys_and_that_others_can_write(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ContextError, match=rf"names private keys, and has mode {mode:04o}.* chmod 600 {file}"):
        load(file)
    file.write_text('[contexts.lab]\naddress = "a:1"')
    assert load(file).get("lab").address == "a:1", "one that names none is only a list of addresses"


def test_a_file_of_somebody_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = file.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    if owner:
        with pytest.raises(ContextError, match=f"it belongs to uid {owner}, you are uid {owner + 1}"):
            load(file)
    else:
        assert load(file).current == "lab", "root's is trusted by all"


def test_a_key_that_others_can_read(file: Path) -> None:
    for mode, fits in ((0o600, True), (0o640, True), (0o644, False), (0o660, False)):
        file.chmod(mode)
        if fits:
            contexts.check_key("here", file)
            continue
        with pytest.raises(ContextError, match=rf"here: {file} is a private key, and has mode {mode:04o}"):
            contexts.check_key("here", file)


def test_another_one_becomes_current_and_all_else_stays(file: Path) -> None:
    contexts.use(load(file), "b.test")
    assert file.read_text() == WHOLE.replace('current = "lab"  # for now', 'current = "b.test"')
    assert file.stat().st_mode & 0o777 == 0o600
    contexts.use(load(file), "none")
    assert file.read_text() == WHOLE.replace('current = "lab"  # for now\n', "")
    assert load(file).current == ""
    contexts.use(load(file), "lab")
    assert load(file) == Contexts(file, "lab", {"lab": LAB, "b.test": B})
    assert [path.name for path in file.parent.iterdir()] == ["contexts.toml"], "nothing is left beside it"


def test_a_file_that_begins_with_a_table(file: Path) -> None:
    file.write_text('[contexts.a]\naddress = "a:1"\n')
    contexts.use(load(file), "a")
    assert file.read_text() == 'current = "a"\n\n[contexts.a]\naddress = "a:1"\n'


def test_the_file_behind_a_link_is_changed(file: Path) -> None:
    link = file.parent / "link.toml"
    link.symlink_to(file)
    contexts.use(load(link), "b.test")
    assert link.is_symlink() and load(file).current == "b.test"


def test_one_that_is_not_there_does_not_become_current(file: Path) -> None:
    with pytest.raises(ContextError, match="no context 'prod'"):
        contexts.use(load(file), "prod")
    assert file.read_text() == WHOLE
    nowhere = file.parent / "nowhere.toml"
    contexts.use(Contexts(nowhere), "none")
    assert not nowhere.exists()


def test_a_text_that_cannot_be_changed_by_line(file: Path) -> None:
    file.write_text('current = """\nlab"""\n\n[contexts.lab]\naddress = "a:1"\n')
    before = load(file)
    assert before.current == "lab"
    with pytest.raises(ContextError, match="current cannot be set in it"):
        contexts.use(before, "none")
    assert load(file) == before


def test_line_ends_stay_as_they_are(file: Path) -> None:
    file.write_bytes(WHOLE.replace("\n", "\r\n").encode())
    contexts.use(load(file), "b.test")
    assert b"\r\n[contexts.lab]\r\n" in file.read_bytes() and load(file).current == "b.test"


def test_roots_change_leaves_it_its_owners(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, found = [], load(file)
    monkeypatch.setattr("os.fchown", lambda _, uid, gid: given.append((uid, gid)))
    contexts.use(found, "b.test")
    before = file.stat()
    monkeypatch.setattr("os.geteuid", lambda: before.st_uid + 1)
    contexts.use(load(file), "lab")
    assert given == [(before.st_uid, before.st_gid)] and load(file).current == "lab"
