"""The command `gcserver`: run the daemon, probe it, make keys, compile kernels, examine and measure, show settings.

What may live here: parsing arguments, printing, exit statuses. What may not: what the commands do; each is imported
only when it is asked for, so that `gcserver run` starts quickly and `gcserver version` at once.

Exit status: 0 done, 1 it could not be done, 2 the command line or the configuration is wrong, 130 interrupted. An
error is one line on stderr; `--log.level debug` adds the traceback of one that nobody foresaw.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gcserver import __version__, config, logsetup, pki_command, scripts, values
from gcserver.commandline import USAGE, Parser
from gcserver.config import Config, ConfigError
from gcserver.config_keys import KEYS, unknown

OK, FAILED, INTERRUPTED = 0, 1, 130


def parser() -> argparse.ArgumentParser:
    """The whole command line; every key of the configuration is a flag of `run`, `config` and `doctor`."""
    top = Parser(prog="gcserver", description="gradcomm's daemon: one per machine", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str, keys: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        if keys:
            add_keys(sub)
        return sub

    add("run", "run the daemon in the foreground; SIGTERM drains it", True)
    keygen = add("keygen", "make the keys of a node, for encrypted and authenticated traffic between daemons", False)
    keygen.add_argument("--name", metavar="NAME", help="its node.name (default: the host name)")
    keygen.add_argument("--folder", type=Path, metavar="DIR", default=Path(), help="where to put them (default: here)")
    add("warmup", "compile the kernels of codecs and plans into the cache, so that the daemon starts at once", False)
    health = add("health", "whether the daemon takes jobs, by its exit status: for probes of containers", True)
    health.add_argument("--live", action="store_true", help="whether it answers at all, also while it drains")
    doctor = add("doctor", "examine this machine and the configuration; say what is wrong and how to mend it", True)
    doctor.add_argument("--json", action="store_true", help="the checks as JSON")
    need = doctor.add_argument_group("memory needed by a model")
    need.add_argument("--params", metavar="N", help="its parameters: 124000000, 124M, 7B")
    need.add_argument("--local-ranks", type=int, default=1, metavar="R", help="workers on this node (default 1)")
    need.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of the job (default 2)")
    need.add_argument("--codec", default="onebit", metavar="SPEC", help="what compresses it (default onebit)")
    need.add_argument("--lanes", type=int, metavar="L", help="lanes of the daemon (default node.lanes)")
    shown = add("config", "show the configuration", True)
    which = shown.add_mutually_exclusive_group()
    which.add_argument(
        "--defaults", action="store_true", help="every key, explained, at its default (a file to start from)"
    )
    which.add_argument("--show", action="store_true", help="what file, variables and flags come to (the default)")
    bench = add("bench", "measure this machine", False)
    what = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    about = "speed of every codec on one core, beside memcpy and numpy, measured in turn"
    _add_bench(what.add_parser("codecs", help=about, description=about, allow_abbrev=False))
    pki_command.add_arguments(add("pki", pki_command.ABOUT, False))
    add("version", "print the version", False)
    return top


def _add_bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--elements", type=int, nargs="+", metavar="N", help="float32 elements (default 1048576 16777216)")
    sub.add_argument("--codecs", nargs="+", metavar="SPEC", help="instead of all, at 1 %% and some others")
    sub.add_argument("--data", choices=("normal", "laplace"), default="normal", help="how gradients are distributed")
    sub.add_argument("--seconds", type=float, default=60.0, metavar="S", help="about, for each size (default 60)")
    sub.add_argument("--targets", action="store_true", help="also what speed was aimed at, and whether it is reached")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows there")


def add_keys(sub: argparse.ArgumentParser) -> None:
    """Every key of the configuration as a flag of a command, and the file."""
    sub.add_argument("--config", type=Path, metavar="FILE", help="TOML file (variable GC_CONFIG)")
    group = sub.add_argument_group("configuration", "each key is also a variable (GC_NODE_NAME) and a key of the file")
    for key in KEYS:
        default = key.derived if key.default is None else values.toml_value(key.default)
        about = f"{key.about} ({key.accepts}; default: {default})".replace("%", "%%")
        options: dict[str, object] = {"nargs": "?", "const": "true"} if key.name == "insecure" else {}
        group.add_argument(key.flag, dest=key.name, metavar="VALUE", default=None, help=about, **options)  # type: ignore[arg-type]


def load(options: argparse.Namespace) -> Config:
    """The configuration of a command that takes keys. Raises ConfigError."""
    return config.load(*said(options), os.environ)


def said(options: argparse.Namespace) -> tuple[Path | None, dict[str, str]]:
    """The file to read, and the keys that are flags, of a command that takes keys."""
    given = vars(options)
    flags = {key.name: given[key.name] for key in KEYS if given[key.name] is not None}
    return options.config or config.named_file(os.environ), flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (argparse itself exits with 2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest:
        word = rest[0].partition("=")[0]
        what = f"{word}: {unknown(word[2:])}" if word.startswith("--") else f"unexpected argument {word!r}"
        return _complain(what, USAGE)
    try:
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _complain(str(error), USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output has seen enough; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ModuleNotFoundError as error:
        return _complain(scripts.missing(error) or str(error), FAILED)
    except Exception as error:
        trace = "debug" in (getattr(options, "log.level", None), os.environ.get("GC_LOG_LEVEL"))
        text = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
        return _complain(text, FAILED, trace=trace)


def _complain(text: str, status: int, level: int = logging.ERROR, trace: bool = False) -> int:
    logsetup.complain("gcserver", " ".join(text.split()), level, trace)
    return status


def _run(options: argparse.Namespace) -> int:
    if (getattr(options, "log.format") or os.environ.get("GC_LOG_FORMAT", "")).strip().lower() == logsetup.JSON:
        # What is wrong with the rest of the configuration is said so too.
        name = getattr(options, "node.name") or os.environ.get("GC_NODE_NAME", "")
        logsetup.begin(logsetup.Voice(name, form=logsetup.JSON))
    settings = load(options)
    logsetup.begin(settings.voice())
    from gcserver.doctor import preflight

    problems = preflight(settings)
    for problem in problems:
        what, level = ("cannot start", logging.ERROR) if problem.fatal else ("warning", logging.WARNING)
        _complain(f"{what}: {problem.text}; {problem.fix}", FAILED, level)
    if any(problem.fatal for problem in problems):
        return FAILED
    from gcserver.runtime import supervisor

    return supervisor.run(settings)


def _keygen(options: argparse.Namespace) -> int:
    from gcserver import keys

    try:
        pair = keys.generate(options.name or config.hostname())
    except ValueError as error:
        return _complain(f"--name: {error}, got {options.name!r}", USAGE)
    secret, public = keys.write(pair, options.folder.absolute())
    print(f"secret key: {secret} (mode 0600; it stays on this machine)\npublic key: {public}")
    print(keys.line(pair.name, pair.public))
    print(
        "\nNext, when every node has its keys:\n"
        "  put all nodes' .pub files into one list, the same on every node:  cat *.pub > peers\n"
        f"  start each with its own key and that list:  gcserver run --node.name {pair.name} "
        f"--security.key {secret} --security.peers {secret.with_name('peers')}"
    )
    return OK


def _warmup(options: argparse.Namespace) -> int:
    _warm_codecs()
    from gcserver.planner.warmup import warmup

    began = time.monotonic()
    if warmup():
        print(f"what plans are made with is compiled, in {time.monotonic() - began:.0f} s")
    return OK


def _warm_codecs() -> None:
    from gcserver.codecs import warmup

    began = time.monotonic()
    if warmup.is_warm():
        print(f"{len(warmup.kernels())} kernels are compiled already")
        return
    live = sys.stdout.isatty()

    def progress(name: str, done: int, total: int) -> None:
        text = f"compiling kernels: {done} of {total} {name}"
        if live:
            print(f"\r{text:<60}", end="", flush=True)
        elif name and done % 5 == 0:
            print(text, flush=True)

    warmup.warmup(progress)
    print(
        ("\r" if live else "")
        + f"{len(warmup.kernels())} kernels compiled in {time.monotonic() - began:.0f} s"
        + " " * 30
    )


def _doctor(options: argparse.Namespace) -> int:
    from gcserver import doctor

    settings, parts = load(options), None
    if options.params is not None:
        lanes = settings.node.lanes if options.lanes is None else options.lanes
        sizes = settings.partition_bytes, settings.min_compress_bytes
        try:
            count = doctor.read_count(options.params)
            parts = doctor.Need(count, options.local_ranks, options.nodes, options.codec, lanes, *sizes).parts()
        except ValueError as error:
            return _complain(f"--params, --local-ranks, --nodes, --codec, --lanes: {error}", USAGE)
    checks = doctor.examine(settings, parts)
    print(doctor.as_json(checks, parts) if options.json else doctor.as_text(checks))
    return FAILED if any(check.result == "fail" for check in checks) else OK


def _health(options: argparse.Namespace) -> int:
    from gcserver import health

    try:
        serving = health.serving(load(options))
    except health.Unhealthy as error:
        return _complain(str(error), FAILED)
    print("serving" if serving else "draining")
    return OK if serving or options.live else FAILED


def _config(options: argparse.Namespace) -> int:
    print(config.describe() if options.defaults else config.to_toml(load(options)), end="")
    return OK


def _bench(options: argparse.Namespace) -> int:
    import json

    from gcserver import bench
    from gcserver.codecs import CodecError

    sizes = options.elements or list(bench.SIZES)
    try:
        bench.check(sizes, options.codecs or ())
    except CodecError as error:
        return _complain(str(error), USAGE)
    _warm_codecs()
    live, rows = sys.stderr.isatty(), []

    def begin(codec: str, done: int, total: int) -> None:
        if live:
            print(f"\r[{done + 1} of {total}] {codec:<60}\r", end="", file=sys.stderr, flush=True)

    for n in sizes:
        print(f"\n{n} elements, {options.data}\n{bench.HEAD}", flush=True)
        part = []
        for group in bench.measure(n, options.codecs, options.data, options.seconds, begin=begin):
            part += group
            print("\n".join(bench.line(row) for row in group), flush=True)
        rows += part
        if options.targets:
            print("\n".join(["", *bench.target_lines(part)]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": bench.machine(), "rows": rows}, indent=1) + "\n")
    return OK


def _pki(options: argparse.Namespace) -> int:
    from gcserver.pki import PkiError

    try:
        pki_command.run(options)
    except PkiError as error:
        return _complain(str(error), FAILED)
    return OK


def _version(options: argparse.Namespace) -> int:
    from gcproto.wire import PROTOCOL_VERSION

    print(f"gradcomm {__version__}, protocol {PROTOCOL_VERSION}")
    return OK


_COMMANDS = {
    "run": _run,
    "keygen": _keygen,
    "warmup": _warmup,
    "doctor": _doctor,
    "health": _health,
    "config": _config,
    "bench": _bench,
    "pki": _pki,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
