"""What may be wrong before a daemon starts: all of it for a person (`gcserver doctor`), what stops it for `run`.

What may live here: which checks are asked and how they are shown, the memory a model needs. What may not: the checks
themselves (`checks.py`), repairing anything.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gcproto.manifest import MAX_SECTION_ELEMENTS
from gcserver import checks, checks_logind, checks_ucx, copies, keychecks
from gcserver.checks import Check
from gcserver.config import Config
from gcserver.runtime.memory_parts import PRIVATE, SHARED, Part, listed, total
from gcserver.values import human_size

_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)
_THOUSANDS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Need:
    """A model of ``parameters`` fp32 values under one codec, trained by ``local_ranks`` workers on each of ``nodes``
    nodes, each with ``lanes`` lanes. What is counted is the node that owns the most."""

    parameters: int
    local_ranks: int = 1
    nodes: int = 2
    codec: str = "onebit"
    lanes: int = 1
    partition_bytes: int = 8 << 20
    min_compress_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        if not 0 < self.parameters <= MAX_SECTION_ELEMENTS or not 0 < self.local_ranks <= 1024:
            raise ValueError("expected 1 to 1.09e12 parameters and 1 to 1024 local ranks")
        if not 0 < self.nodes <= 65536 or not 0 < self.lanes <= 64:
            raise ValueError("expected 1 to 65536 nodes and 1 to 64 lanes")

    def parts(self) -> list[Part]:
        """What it is needed for. Raises CodecError."""
        from gcserver.runtime import memory  # numba takes most of a second to import

        laid = memory.a_model(
            self.parameters, self.codec, self.nodes, self.lanes, self.partition_bytes, self.min_compress_bytes
        )
        share = memory.Share(self.nodes, 0, self.local_ranks)
        return [*memory.of_domain(laid, share, self.lanes), *memory.of_daemon(self.lanes)]


def read_count(text: str) -> int:
    """A number of parameters: ``124000000``, ``1.3e9``, ``124M``, ``7B``. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a number such as 124000000, 124M or 7B, got {text!r}")
    return round(float(found[1]) * _THOUSANDS[found[2].lower()])


def preflight(config: Config) -> list[Check]:
    """What keeps a daemon from starting (``fatal``) or will hurt it; empty when all is well. Takes less than 1 s."""
    found = checks.peer_names(config)
    # A daemon that serves the socket holds its ports too: then naming it says more than ten busy ports.
    served = checks.socket_served(config.node.socket, 0.4)
    if served.fatal:
        return [*found, served]
    found += _places(config)
    found += _certificates(config)
    found.append(checks.directory_usable("socket", "node.socket", config.node.socket.parent))
    found.append(checks.directory_usable("state", "node.state", config.node.state))
    found += keychecks.keys_of(config)
    found += checks_ucx.library(config)
    found.append(checks.shared_memory(config))
    found.append(checks.locked_memory(checks.one_partition(config)))
    found.append(checks.cores(config.node.cores, config.node.lanes))
    found.append(checks.open_files(config))
    found.append(checks.advertised(config, 0.4))
    return [check for check in found if check.result != "ok"]


def examine(config: Config, parts: list[Part] | None = None, timeout: float = 2.0) -> list[Check]:
    """Every check, in the order a person wants them; peers get ``timeout`` seconds to answer.

    ``parts``: what a model needs (:class:`Need`).
    """
    need = total(parts or [])
    found = [_python(), _kernels(), checks.cores(config.node.cores, config.node.lanes)]
    running = _running(config)
    if running is not None:
        found.append(Check("ports", "ok", "held by the daemon that runs"))
        found.append(running)
    else:
        found += _places(config)
        found.append(checks.socket_served(config.node.socket, timeout))
    found += _certificates(config)
    found.append(checks.advertised(config, timeout))
    found.append(checks.directory_usable("socket", "node.socket", config.node.socket.parent))
    found.append(checks.directory_usable("state", "node.state", config.node.state))
    if (kept := checks_logind.kept_at_logout(config.node.state, os.getuid(), timeout)) is not None:
        found.append(kept)
    found += keychecks.keys_of(config)
    found += checks_ucx.library(config)
    wrong = checks.peer_names(config)
    found += wrong
    found += checks.in_parallel([partial(checks.peer_reachable, peer, timeout) for peer in config.others])
    if not config.cluster.peers:
        found.append(Check("peers", "ok", "none configured: torchrun's store or a single node"))
    found.append(checks.shared_memory(config, need))
    found.append(checks.locked_memory(need or checks.one_partition(config)))
    found += [checks.open_files(config), checks.clock(), _malloc(), _copies(config)]
    for kind in (SHARED, PRIVATE) if parts else ():
        most = "" if kind == SHARED else "at most "
        text = (
            f"{most}{human_size(total(parts or [], kind))} of {kind} memory on this node: {listed(parts or [], kind)}"
        )
        found.append(Check(f"{kind} need", "ok", text))
    return found


def _places(config: Config) -> list[Check]:
    """Whether all addresses can be bound."""
    found = [checks.port_free(*bound) for bound in checks.bound_addresses(config)]
    if config.node.admin.startswith("unix:"):
        found.append(checks.admin_socket_served(Path(config.node.admin.removeprefix("unix:")), 0.2))
    return found


def _certificates(config: Config) -> list[Check]:
    """Whether operators can be let in by certificate, and for how long; nothing where none are configured."""
    if config.admin.files is None:
        return []
    # Imported late: most configurations have none.
    from gcserver.checks_certificates import certificates

    return certificates(*config.admin.files)


def _running(config: Config) -> Check | None:
    """The daemon this configuration describes, when it runs already; None when it does not."""
    try:
        who = checks.ask_daemon(config.node.socket, 1.0)
    except OSError:
        return None
    if who is None or who.node != config.node.name or who.address != str(config.node.advertise):
        return None
    return Check("socket", "ok", f"served by this node's daemon, {who.node!r} at {who.address}")


def _python() -> Check:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.version_info < (3, 11) or not sys.platform.startswith("linux"):
        return Check("python", "fail", text, "use Linux and Python 3.11 or newer")
    return Check("python", "ok", text)


def _kernels() -> Check:
    try:
        from gcserver.codecs import warmup  # numba takes most of a second to import

        warm, total = warmup.is_warm(), len(warmup.kernels())
    except Exception as error:  # whatever keeps numba from loading is the finding
        fix = "install gradcomm[server]; the message says what is missing"
        return Check("kernels", "fail", f"cannot be loaded: {type(error).__name__}: {error}", fix)
    if not warm:
        return Check(
            "kernels", "warn", f"not all {total} are compiled: the first start takes a minute", "gcserver warmup"
        )
    return Check("kernels", "ok", f"{total} compiled and cached")


def _malloc() -> Check:
    """Lanes tell glibc's malloc to keep its pages; with another one every received megabyte touches fresh ones."""
    libc, version = platform.libc_ver()
    if libc != "glibc":
        text = "the C library is not glibc: received data will touch fresh pages, which costs as much as a copy"
        return Check("malloc", "warn", text, "use a glibc-based system or image")
    preload = os.environ.get("LD_PRELOAD", "")
    if "malloc" in preload:
        text = f"LD_PRELOAD={preload} replaces glibc's malloc, which the lanes tell to keep its pages"
        return Check("malloc", "warn", text, "start gcserver without it")
    return Check("malloc", "ok", f"glibc {version}, told by the lanes to keep its pages")


def _copies(config: Config) -> Check:
    """Lanes are started so that they copy blocks around the caches; who trains is not."""
    least, block = copies.threshold(), config.partition_bytes
    if least is None:
        return Check("copies", "ok", "the C library does not say how it copies blocks")
    if least <= block:
        return Check("copies", "ok", f"glibc copies {human_size(least)} and more around the caches")
    size, until = human_size(block), human_size(least)
    text = f"glibc copies blocks ({size}) through the caches, as all below {until}: slower"
    return Check("copies", "warn", text, f"train under gcrun, or with {copies.VARIABLE}={copies.SETTING}")


def as_text(found: list[Check]) -> str:
    """The checks as lines for a person, the fix below what needs one, and a count."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.result:<4}  {check.name:<{width}}  {check.text}")
        if check.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.fix}")
    fails = sum(check.result == "fail" for check in found)
    warns = sum(check.result == "warn" for check in found)
    lines.append(f"{len(found)} checks, {fails} failed, {warns} warning{'' if warns == 1 else 's'}")
    return "\n".join(lines)


def as_json(found: list[Check], parts: list[Part] | None = None) -> str:
    """The same for a program: ``{"ok": ..., "checks": [{name, result, text, fix}], "need": {...}}``.

    ``need``: bytes of ``shared`` and ``private`` memory, and ``parts``: ``what``, ``kind``, ``bytes``, ``exact``.
    """
    document: dict[str, object] = {"ok": not any(check.fatal for check in found), "checks": [asdict(c) for c in found]}
    if parts is not None:
        items = [{"what": p.what, "kind": p.kind, "bytes": p.nbytes, "exact": p.exact} for p in parts]
        document["need"] = {"shared": total(parts), "private": total(parts, PRIVATE), "parts": items}
    return json.dumps(document, indent=2)
