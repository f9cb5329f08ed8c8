"""Codecs of other distributions: found by entry point, as docs/codecs.md shows; one that is broken harms nobody."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "codecs.md"


def documented():
    """(the example's source, its entry points) as docs/codecs.md prints them."""
    section = DOCS.read_text().split("## A codec of your own")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    points = re.search(r"```toml\n(.*?)```", section, re.DOTALL)[1]
    return code, points


def install(folder, name, modules, entry_points):
    """A distribution as an installer leaves it: modules, and a .dist-info beside them."""
    folder.mkdir(exist_ok=True)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[gradcomm.codecs]\n{lines}")


def run(script, folder):
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_documented_codec_works_when_installed(tmp_path):
    code, points = documented()
    assert len(code.splitlines()) < 40
    (key, value) = re.search(r'"gradcomm\.codecs"\]\n(\S+) = "(\S+)"', points).groups()
    install(tmp_path, "acme", {value.partition(":")[0]: code}, {key: value})
    errors = run(
        """
import numpy as np
from gcserver.codecs import CodecError, by_id, names, parse
codec = parse("acme-int8")
assert codec.spec == "acme-int8" and names()[-1] == "acme-int8"
assert type(by_id(40000, 0)) is type(codec) and codec.state_floats(7, 1) == 0
x = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
for n in (0, 1, 1001):
    out = np.zeros(codec.max_bytes(n), np.uint8)
    result = codec.encode(x[:n], None, None, out, None, 0.5)
    assert result.nonfinite == 0 and result.nbytes == n + 4
    dense, acc = np.empty(n, np.float32), x[:n].copy()
    codec.decode(out[: result.nbytes], dense)
    step = out[:4].view("<f4")[0]
    assert np.abs(dense - x[:n] * np.float32(0.5)).max(initial=0) <= step * 0.51
    codec.decode_add(memoryview(out.tobytes()), acc)
    assert np.array_equal(acc, x[:n] + dense)
    for wrong in (out[:-1], np.append(out, np.uint8(0))):
        try:
            codec.decode(wrong, dense)
        except CodecError as error:
            assert error.field == "payload.nbytes"
        else:
            raise AssertionError(n)
assert codec.encode(np.array([1, np.nan, np.inf], np.float32), None, None, np.zeros(7, np.uint8), None).nonfinite == 2
""",
        tmp_path,
    )
    assert "not available" not in errors


#: one of each way an entry point can be wrong: (name, value, what is said of it)
BROKEN = [
    ("absent", "no_such_module:Codec", "ModuleNotFoundError"),
    ("crashing", "crashing:Codec", "ZeroDivisionError"),
    ("function", "wrong:function", "a subclass of gcserver.codecs.Codec"),
    ("misnamed", "wrong:Named", "the codec's name, 'other'"),
    ("low-id", "wrong:LowId", "32768..65535 for third parties, got 12"),
    ("fp16", "wrong:Taken", "not in use by Fp16"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    wrong = """
from gcserver.codecs import Codec
def function(): pass
class Named(Codec): id, name = 40001, "other"
class LowId(Codec): id, name = 12, "low-id"
class Taken(Codec): id, name = 40002, "fp16"
"""
    modules = {"crashing": "1 / 0", "wrong": wrong}
    install(folder, "rotten", modules, {name: value for name, value, _ in BROKEN})
    return folder


def test_broken_codecs_are_reported_and_change_nothing(broken):
    errors = run(
        """
from gcserver.codecs import CodecError, names, parse
from gcserver.codecs.casts import Fp16
assert type(parse("fp16")) is Fp16
for name in ("absent", "crashing", "function", "misnamed", "low-id", "other"):
    assert name not in names()
try:
    parse("crashing")
except CodecError as error:
    assert "entry point crashing:Codec of rotten: ZeroDivisionError" in str(error), error
else:
    raise AssertionError
""",
        broken,
    )
    for name, value, says in BROKEN:
        (line,) = (line for line in errors.splitlines() if f"codec {name!r} is not available" in line)
        assert f"entry point {value} of rotten: " in line and says in line


def test_a_third_partys_kernel_is_compiled_by_warmup_and_again_when_its_file_changes(tmp_path):
    source = """
from gcserver.codecs.jit import kernel
@kernel("int64(int64)")
def acme_kernel(x):
    return x + {}
from gcserver.codecs import Codec
class Acme(Codec): id, name = 40003, "acme-kernel"
"""
    check = """
from gcserver.codecs import names
from gcserver.codecs.jit import compile_kernel, is_cached
from gcserver.codecs.warmup import kernels
(mine,) = (k for k in kernels() if k.__name__ == "acme_kernel")
assert is_cached(mine) == {}
compile_kernel(mine)
assert mine(1) == {}
"""
    install(tmp_path, "acme-kernels", {"acme_kernels": source.format(1)}, {"acme-kernel": "acme_kernels:Acme"})
    run(check.format(False, 2), tmp_path)
    run(check.format(True, 2), tmp_path)
    (tmp_path / "acme_kernels.py").write_text(source.format(2))
    run(check.format(False, 3), tmp_path)
