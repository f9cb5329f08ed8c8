"""The file of contexts: daemons by name, for `gcctl --context NAME`.

What may live here: where the file is, what may be in it, whether it can be trusted, which context is the current one.
What may not: what of a context is used in a call (`gcctl_settings.py`), what commands print (`gcctl_contexts.py`).

    current = "lab"

    [contexts.lab]
    address = "a.cluster:7460"
    tls_ca = "~/gradcomm/ca.pem"
    tls_cert = "~/gradcomm/operator-alice.pem"
    tls_key = "~/gradcomm/operator-alice.key"
    timeout = "30s"
    job = "gpt"
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from gcserver import values
from gcserver.admin.exits import CtlError, Exit

VARIABLE: Final = "GCCTL_CONFIG"
#: longest path of a Unix socket, bytes
_SOCKET: Final = 107
#: longest time that anything here is waited for, seconds
LONGEST: Final = 365 * 86400.0
#: name of the context that is none: no file's settings are used
NONE: Final = "none"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME_FORM: Final = f"1 to 64 letters, digits, '.', '_' or '-', and not {NONE!r}"
#: bytes of a file; a slip may name anything
_MOST: Final = 1 << 20
_CURRENT: Final = re.compile(r"\s*(current|\"current\"|'current')\s*=")


class ContextError(CtlError):
    """The file of contexts, or what was asked of it, is wrong. ``str()`` names the file, the key and what to do."""

    status = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Context:
    """What to use where neither an option nor a variable says otherwise; "" or None: nothing said."""

    name: str
    address: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    timeout: float | None = None
    job: str = ""


KEYS: Final = tuple(f.name for f in fields(Context) if f.name != "name")


@dataclass(frozen=True, slots=True)
class Contexts:
    """What a file says. ``current``: "" for none."""

    path: Path
    current: str = ""
    known: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Raises :class:`ContextError`."""
        if name in self.known:
            return self.known[name]
        near = difflib.get_close_matches(name, self.known, 1)
        have = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.known) or 'none'}"
        raise ContextError(f"{self.path}: no context {name!r}; {have} (`gcctl context list`)")


def read_address(text: str) -> str:
    """``host:port`` or ``unix:/path``. Raises ValueError, which says what would be accepted."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        try:
            length = len(path.encode())
        except UnicodeEncodeError:  # bytes of the command line that are no letters
            length = 0
        if not 0 < length <= _SOCKET or "\0" in path:
            raise ValueError(f"expected unix: and the path of a socket, at most {_SOCKET} bytes of UTF-8")
        return text
    return values.read_endpoint(text, "host:port or unix:/path").endpoint


def read_timeout(text: str) -> float:
    """How long a daemon may take, seconds. Raises ValueError, which says what would be accepted."""
    seconds = values.read_duration(text)
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"expected more than 0 s and at most {values.human_duration(LONGEST)}")
    return seconds


def place(environ: Mapping[str, str]) -> Path:
    """Where the file is looked for: ``$GCCTL_CONFIG``, else below ``$XDG_CONFIG_HOME``, else ``~/.config``."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    base = environ.get("XDG_CONFIG_HOME", "")
    # Relative ones are to be ignored, says the XDG Base Directory Specification.
    folder = Path(base) if os.path.isabs(base) else Path(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return folder / "gradcomm" / "contexts.toml"


def load(environ: Mapping[str, str]) -> Contexts:
    """All contexts; none where there is no file, unless a variable names one. Raises :class:`ContextError`."""
    path = place(environ)
    if not os.path.exists(path):  # or cannot be seen, as the home of whom sudo was called by
        if environ.get(VARIABLE):
            raise ContextError(f"{VARIABLE}: {path} is not there; write it, or unset the variable")
        return Contexts(path)
    text = _text(path)
    found = parse(path, text)
    if any(context.tls_key for context in found.known.values()):
        _trusted(path)
    return found


def _text(path: Path) -> str:
    """What a file holds, line ends as they are. Raises :class:`ContextError`."""
    try:
        with path.open("rb") as file:  # which may be a pipe of the shell's
            held = file.read(_MOST + 1)
        text = held.decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ContextError(f"{path} cannot be read: {why}") from None
    if len(held) > _MOST:
        raise ContextError(f"{path} has more than {_MOST} bytes; expected a file of contexts")
    return text


def parse(path: Path, text: str) -> Contexts:
    """What a file with this text says. Raises :class:`ContextError`."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not all that it raises is a TOMLDecodeError
        raise ContextError(f"{path}: expected TOML, got: {error}") from None
    for key in content:
        if key not in ("current", "contexts"):
            raise ContextError(f"{path}: {key}: expected current and tables [contexts.NAME], and no other key")
    tables = content.get("contexts", {})
    if not isinstance(tables, dict):
        raise ContextError(f"{path}: contexts: expected tables [contexts.NAME], got {type(tables).__name__}")
    found = Contexts(path, known={name: _context(path, name, table) for name, table in tables.items()})
    current = content.get("current", "")
    if not isinstance(current, str) or (current and current not in found.known):
        have = ", ".join(found.known) or "none"
        raise ContextError(f"{path}: current: expected the name of a context (there are: {have}), got {current!r}")
    return replace(found, current=current)


def _context(path: Path, name: str, table: object) -> Context:
    where = f"{path}: contexts.{name}"
    if not _NAME.fullmatch(name) or name == NONE:
        raise ContextError(f"{where}: expected a name of {_NAME_FORM}")
    if not isinstance(table, dict):
        raise ContextError(f"{where}: expected a table, got {type(table).__name__}")
    read: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}"
            raise ContextError(f"{where}.{key}: unknown key; {hint}")
        if not isinstance(value, str) or not value:
            raise ContextError(f"{where}.{key}: expected a text, got {value!r}")
        try:
            read[key] = _READERS.get(key, str)(value)
        except ValueError as error:
            raise ContextError(f"{where}.{key}: {error}; got {value!r}") from None
    files = [key for key in ("tls_ca", "tls_cert", "tls_key") if key in read]
    if 0 < len(files) < 3:
        raise ContextError(f"{where}: expected tls_ca, tls_cert and tls_key or none of them, got {' and '.join(files)}")
    return Context(name, **read)


_READERS: Final[Mapping[str, Any]] = {"address": read_address, "timeout": read_timeout}


def check_key(source: str, key: Path) -> None:
    """Whether a private key that a context names is its user's alone; a group may read it, which is how orchestrators
    hand a secret to a service. ``source``: who names it. Raises :class:`ContextError`."""
    if why := _open_to(key, 0o037):
        raise ContextError(f"{source}: {key} is a private key, and {why}; chown it to you and chmod 600 {key}")


def _trusted(path: Path) -> None:
    """Whoever may write the file could send a holder of a key to a daemon of theirs. Raises :class:`ContextError`."""
    if why := _open_to(path, 0o022):
        raise ContextError(f"{path} names private keys, and {why}; chown it to you and chmod 600 {path}")


def _open_to(path: Path, bits: int) -> str:
    """Why others may do with a file what these bits of its mode say; "" where they may not."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.getuid(), 0):
        return f"it belongs to uid {found.st_uid}, you are uid {os.getuid()}"
    return f"has mode {mode:04o}, with which others may use it" if mode & bits else ""


def use(contexts: Contexts, name: str) -> None:
    """Make a context the current one in the file; NONE: none of them. Raises :class:`ContextError`."""
    chosen = "" if name == NONE else contexts.get(name).name
    try:
        target = Path(os.path.realpath(contexts.path))  # of a link what it points to
        text = _text(target) if chosen or target.exists() else ""
        changed = _with_current(text, chosen)
        if not _says(contexts.path, changed, replace(contexts, current=chosen)):
            raise ContextError(f'{contexts.path}: current cannot be set in it; write current = "{chosen}" into its top')
        if changed != text:
            _replace(target, changed)
    except OSError as error:
        raise ContextError(f"{contexts.path} cannot be written: {error.strerror}") from None


def _says(path: Path, text: str, wanted: Contexts) -> bool:
    try:
        return parse(path, text) == wanted
    except ContextError:
        return False


def _with_current(text: str, name: str) -> str:
    """The text with another line for ``current``; all else, comments too, stays as it is."""
    lines = text.splitlines(keepends=True)
    line = [f'current = "{name}"\n'] if name else []
    for i, old in enumerate(lines):
        if old.lstrip().startswith("["):
            break  # from here on keys are those of tables
        if _CURRENT.match(old):
            return "".join([*lines[:i], *line, *lines[i + 1 :]])
    return "".join([*line, *(["\n"] if line and lines and lines[0].lstrip().startswith("[") else []), *lines])


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, and with the mode that it has; of root's making its owner's still."""
    number, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text.encode())
            before = path.stat()
            if before.st_uid != os.geteuid():
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
