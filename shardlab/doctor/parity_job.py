"""One rank of a comparison: `python -m shardlab.doctor.parity_job DIRECTORY`, which holds spec.json.

For each pass and side a file of what each step computed: `{pass}-{side}.npz`.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardlab.backends.optimizer import build_optimizer
from shardlab.doctor import tiny
from shardlab.doctor.runs import Step, initial_weights, run_ds_config, run_plan
from shardlab.errors import UserError
from shardlab.plan import Offload, Plan
from shardlab.recipe import Recipe
from shardlab.runtime.child import run_rank
from shardlab.runtime.environment import apply_in_process
from shardlab.topology import Topology
from shardlab.train.schedules import learning_rate

_TIMEOUT_SECONDS = 120.0


def main() -> None:
    """Run both sides of each pass."""
    directory = Path(sys.argv[1])
    spec = json.loads((directory / "spec.json").read_text())
    apply_in_process()
    topology = Topology.detect(timeout_seconds=_TIMEOUT_SECONDS)
    for number, one in enumerate(spec["passes"]):
        for side, given in enumerate(one["sides"]):
            if topology.is_main:
                (directory / "under-way").write_text(str(side))
            torch.manual_seed(0)
            model = tiny.tiny_model(spec["model"])
            before = initial_weights(model)
            steps = list(_steps(given, model, spec["steps"], topology))
            if topology.is_main:
                _write(directory / f"{number}-{side}.npz", before, steps)


def _steps(given: dict[str, Any], model: nn.Module, steps: int, topology: Topology) -> Iterator[Step]:
    optimizer, schedule = _optimizer_and_schedule(given)
    own = given["ds_config"]["optimizer"]["params"] if given["own_optimizer"] else {}
    peak = float(own.get("lr", optimizer.lr))

    def rate(step: int) -> float:
        return learning_rate(schedule, peak=peak, applied=step, steps=given["steps"])

    if given["kind"] == "plan":
        plan = Plan(
            backend=given["backend"],
            world_size=topology.world_size,
            micro_batch=given["micro_batch"],
            accumulation=given["accumulation"],
            global_batch_size=given["global_batch_size"],
            precision=given["precision"],
            recompute=given["recompute"],
            reshard_after_forward=given["reshard_after_forward"],
            offload=Offload(
                "cpu" if given["offload_parameters"] else "none", "cpu" if given["offload_optimizer"] else "none"
            ),
            clip_grad_norm=given["clip_grad_norm"],
            seed=given["seed"],
        )
        return run_plan(model, plan, optimizer, rate, tiny.batch, steps)
    config = given["ds_config"] | {
        "train_micro_batch_size_per_gpu": given["micro_batch"],
        "gradient_accumulation_steps": given["accumulation"],
    }
    return run_ds_config(
        model,
        config,
        None if given["own_optimizer"] else lambda named: build_optimizer(optimizer, named),
        None if given["own_schedule"] else rate,
        tiny.batch,
        steps,
    )


def _optimizer_and_schedule(given: dict[str, Any]) -> tuple[Any, Any]:
    train = {"optimizer": given["optimizer"], "schedule": given["schedule"]}
    recipe = Recipe.from_dict({"train": train}, where="the optimizer")
    return recipe.train.optimizer, recipe.train.schedule


def _write(file: Path, before: dict[str, torch.Tensor], steps: list[Step]) -> None:
    if not all(step.weights.keys() == before.keys() for step in steps):
        raise UserError("the model's tensors can't be told apart by name")  # a family that ties by copying
    arrays: dict[str, Any] = {f"before/{name}": value.numpy() for name, value in before.items()}
    for number, step in enumerate(steps):
        arrays |= {f"{number}/{name}": value.numpy() for name, value in step.weights.items()}
    arrays["losses"] = np.array([step.loss for step in steps])
    arrays["norms"] = np.array([math.nan if step.grad_norm is None else step.grad_norm for step in steps])
    np.savez(file, **arrays)


if __name__ == "__main__":
    sys.exit(run_rank(main))
