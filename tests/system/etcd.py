"""A real etcd of one member on loopback, for tests.

What may live here: whether there is one. What may not: how it is started (`benchmarks.lab.etcd`), assertions.
"""

from __future__ import annotations

import shutil

import pytest

from benchmarks.lab.etcd import Etcd

__all__ = ["Etcd", "needs_etcd"]

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)")
