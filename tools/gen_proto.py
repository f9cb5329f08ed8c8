"""Regenerates proto/admin_pb2.py, admin_pb2.pyi and admin_pb2_grpc.py from proto/admin.proto.

The .proto is compiled as `gcproto/admin.proto`, the name it is imported by: so the generated files
import each other as `gcproto` without being patched, and the descriptor cannot collide with another library's
`admin.proto`. constraints.txt fixes the grpcio-tools that generates; another one gives other bytes.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

from tools import generated

PROTO = generated.ROOT / "proto"
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


def main(argv: list[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="gen-proto-") as folder:
        made = {PROTO / path.name: path.read_text() for path in generate(Path(folder))}
    return generated.keep(made, "proto", argv)


if __name__ == "__main__":
    sys.exit(main())
