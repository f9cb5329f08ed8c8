"""Regenerates proto/admin_pb2.py, admin_pb2.pyi and admin_pb2_grpc.py from proto/admin.proto.

`python tools/gen_proto.py` writes them; with `--check` it writes nothing and exits with 1 when they are not
current. The .proto is compiled as `gcproto/admin.proto`, the name it is imported by: so the generated files
import each other as `gcproto` without being patched, and the descriptor cannot collide with another library's
`admin.proto`. constraints.txt fixes the grpcio-tools that generates; another one gives other bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent.parent / "proto"
SOURCES = ("admin",)


def generate(out: Path) -> list[Path]:
    """Compiles every source into `out` and returns the files written; RuntimeError when protoc refuses."""
    staged = out / "in" / "gcproto"
    staged.mkdir(parents=True)
    for source in SOURCES:
        (staged / f"{source}.proto").write_bytes((PROTO / f"{source}.proto").read_bytes())
    well_known = str(files("grpc_tools") / "_proto")
    target = out / "out"
    target.mkdir()
    arguments = ["protoc", f"-I{staged.parent}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    arguments += [f"gcproto/{source}.proto" for source in SOURCES]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc refused the source; its message is above")
    return sorted((target / "gcproto").iterdir())


def stale(generated: list[Path]) -> list[str]:
    """Names of generated files whose checked-in copy is missing or differs."""
    names = []
    for path in generated:
        current = PROTO / path.name
        if not current.exists() or current.read_bytes() != path.read_bytes():
            names.append(path.name)
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="regenerate the code of proto/admin.proto")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when not current")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gen-proto-") as folder:
        generated = generate(Path(folder))
        changed = stale(generated)
        if options.check:
            for name in changed:
                print(f"proto/{name} is not current: run `make proto`", file=sys.stderr)
            return 1 if changed else 0
        for path in generated:
            if path.name in changed:
                (PROTO / path.name).write_bytes(path.read_bytes())
                print(f"wrote proto/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
