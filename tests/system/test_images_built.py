"""`deploy/docker`, built and run: both images, and a training of both as docs/deploy/containers.md says.

What may live here: images and containers. What may not: judging the Dockerfiles (`test_images.py`), making containers
(`container.py`). Takes minutes and two gigabytes: a part of `make test-long`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.system.container import Buildah, needs

ROOT: Final = Path(__file__).resolve().parents[2]
BASE, SERVER, CLIENT = "localhost/base", "localhost/gradcomm-server", "localhost/gradcomm-client"
USER: Final = 10001
VERSION: Final = "import gcclient, importlib.metadata as m; print(m.version('gradcomm'))"

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    needs("buildah", "debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Both images, built; of what that takes nothing stays."""
    buildah = Buildah(tmp_path_factory.mktemp("images"))
    try:
        buildah.base(BASE)
        buildah.build(SERVER, ROOT / "deploy/docker/server.Dockerfile", ROOT, BASE=BASE)
        buildah.build(CLIENT, ROOT / "deploy/docker/client.Dockerfile", ROOT, BASE=BASE)
        yield buildah
    finally:
        shutil.rmtree(buildah.folder)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """What the page mounts: of the images' user, as an engine makes volumes of an image's folders."""
    made = []
    for name, at in (("sockets", "/run/gradcomm"), ("cache", "/cache")):
        (folder := tmp_path / name).mkdir(mode=0o700)
        os.chown(folder, USER, USER)
        made.append(f"{folder}:{at}")
    return made


@pytest.fixture
def daemon(images: Buildah, folders: list[str], tmp_path: Path) -> Iterator[str]:
    """A container with a daemon that is healthy."""
    log = tmp_path / "daemon.log"
    with images.running(SERVER, folders, ["gcserver", "run"], log) as (container, process):
        end = time.monotonic() + 600
        while subprocess.run(images.inside(container, folders, ["gcserver", "health"]), check=False).returncode:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield container


def test_an_image_is_of_the_charts_user_and_says_how_to_begin(images: Buildah) -> None:
    of = "{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}"
    assert images.inspect(SERVER, of) == f"{USER}:{USER} [gcserver] [run]"
    assert images.inspect(CLIENT, of) == f"{USER}:{USER} [] [python]"


def test_the_images_are_of_the_repositorys_version(images: Buildah, tmp_path: Path) -> None:
    ours = images.run(SERVER, [], ["gcserver", "version"], tmp_path / "server", 120)
    theirs = images.run(CLIENT, [], ["python", "-c", VERSION], tmp_path / "client", 120)
    assert theirs.strip() in ours


def test_a_worker_trains_by_the_daemon_beside_it(
    images: Buildah, daemon: str, folders: list[str], tmp_path: Path
) -> None:
    asked = images.inside(daemon, folders, ["gcctl", "status"])
    status = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert status.returncode == 0, status.stderr
    command = ["torchrun", "--nproc-per-node=1", "/opt/gradcomm/examples/train_gpt.py"]
    command += ["--steps", "20", "--comm", "gradcomm", "--codec", "onebit"]
    said = images.run(CLIENT, folders[:1], command, tmp_path / "client.log", 300)
    assert re.search(r"^step 20 .*loss", said, re.MULTILINE), said[-2000:]
