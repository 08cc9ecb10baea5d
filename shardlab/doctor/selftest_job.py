"""One rank of the self-test: `python -m shardlab.doctor.selftest_job DIRECTORY NAME…`, a result file for each name."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardlab.doctor import tiny
from shardlab.doctor.runs import run_plan
from shardlab.doctor.selftest import COLLECTIVES, RANKS
from shardlab.plan import Plan
from shardlab.recipe import AdamW
from shardlab.runtime.child import run_rank
from shardlab.runtime.environment import apply_in_process
from shardlab.topology import Topology, check_collectives

_MICRO_BATCH, _ACCUMULATION = 2, 2
_TIMEOUT_SECONDS = 60.0  # how long a collective waits


def main() -> None:
    """Run each check that was asked for, in order."""
    directory, *names = sys.argv[1:]
    apply_in_process()
    topology = Topology.detect(RANKS, _TIMEOUT_SECONDS)
    for name in names:
        started = time.monotonic()
        figures: dict[str, Any] = {}
        if name == COLLECTIVES:
            check_collectives(topology)
        else:
            figures = _one_step(name, topology)
        if topology.is_main:
            figures["seconds"] = time.monotonic() - started
            _write(Path(directory) / f"{name}.json", figures)


def _write(file: Path, figures: dict[str, Any]) -> None:
    """It is there whole or not at all: the doctor waits for it to appear."""
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(figures))
    os.replace(temporary, file)


def _one_step(name: Any, topology: Topology) -> dict[str, Any]:
    batch_size = _MICRO_BATCH * _ACCUMULATION * topology.world_size
    plan = Plan(name, topology.world_size, _MICRO_BATCH, _ACCUMULATION, batch_size, "fp32")
    torch.manual_seed(0)
    model = tiny.tiny_model(None)
    (step,) = run_plan(model, plan, AdamW(), lambda _: 1e-3, tiny.batch, 1)
    return {"loss": step.loss, "grad_norm": step.grad_norm}


if __name__ == "__main__":
    sys.exit(run_rank(main))
