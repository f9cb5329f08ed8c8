"""What the workers of test_examples.py and test_frameworks.py do: run a program of examples/ as a launcher would.

What may live here: functions that return plain data. What may not: assertions that the parent can make, training.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import gcclient
from tests.integration.workers import digest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(script: str, argv: Sequence[str]) -> dict[str, Any]:
    """Run a script to its end: what its ``model`` came to (this rank's shards), ``stats()`` when it left the job."""
    sys.path.insert(0, str(EXAMPLES))  # as for a file that is started by its path
    sys.argv = [script, *argv]
    stats: dict[str, Any] = {}
    leave = gcclient.shutdown

    def shutdown() -> None:
        if gcclient.is_initialized():
            stats.update(gcclient.stats())
        leave()

    gcclient.shutdown = shutdown
    names = runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    weights: list[torch.Tensor] = [
        p.to_local() if isinstance(p, DTensor) else p.detach() for p in names["model"].parameters()
    ]
    return {"weights": digest(*weights), "finite": all(bool(w.isfinite().all()) for w in weights), "stats": stats}


if __name__ == "__main__":  # under torchrun: the script and its arguments
    found = example(sys.argv[1], sys.argv[2:])
    Path(f"{os.environ['GC_TEST_OUT']}.{os.environ['RANK']}").write_text(json.dumps(found))
