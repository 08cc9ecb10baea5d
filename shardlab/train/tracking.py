"""Experiment trackers by name, through Accelerate's own classes: `train.trackers: [tensorboard, wandb, mlflow]`.

Their files lie in the run's directory, in `tracking/`, and nothing leaves the machine, unless the user's environment
says otherwise (`WANDB_MODE`, `MLFLOW_TRACKING_URI`, ...).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.errors import UserError
from shardlab.plan import Plan
from shardlab.recipe import Recipe
from shardlab.train.callbacks import Callback, Evaluation, StepResult
from shardlab.train.metrics import evaluation_row, step_row

if TYPE_CHECKING:
    from shardlab.train.engine import Engine

PROJECT = "shardlab"
PLANNED = ("backend", "world_size", "micro_batch", "accumulation")  # what the plan decides, beside the recipe
# What any one of is enough for Accelerate, and what to install.
_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


def check_trackers(recipe: Recipe) -> None:
    """Raises UserError for a tracker that is not installed: before the run, not after it."""
    for name in recipe.train.trackers:
        if not any(importlib.util.find_spec(module) for module in _MODULES[name]):
            raise UserError(
                f"train.trackers: {name} is not installed: `pip install {_PACKAGES[name]}`, or all of them with "
                "`pip install 'shardlab[trackers]'`"
            )


class Trackers(Callback):
    """Logs the configuration, and what is in metrics.jsonl row by row, to trackers; for the main rank only."""

    def __init__(self, recipe: Recipe, output: Path):
        self._recipe = recipe
        self._directory = output.absolute() / "tracking"
        self._run_name = output.name
        self._trackers: list[Any] = []

    def on_start(self, engine: Engine) -> None:
        """See `Callback`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        values = configuration(self._recipe, engine.plan)
        for name in self._recipe.train.trackers:
            tracker = _STARTS[name](self._directory, self._run_name)
            self._trackers.append(tracker)
            tracker.store_init_configuration(values)

    def on_step(self, engine: Engine, result: StepResult) -> None:
        """See `Callback`."""
        self._log(step_row(result, engine.nonfinite_steps))

    def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self._log(evaluation_row(evaluation))

    def _log(self, row: dict[str, Any]) -> None:
        # A loss of None is a window without a token: no point in the curve, rather than a 0.
        values = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(values, step=row["step"])

    def on_end(self, engine: Engine, error: BaseException | None) -> None:
        """See `Callback`. A run that failed is shown as failed, where the tracker has a word for it."""
        with ExitStack() as stack:  # one that fails does not keep the others from finishing
            for tracker in self._trackers:
                stack.callback(tracker.finish if error is None else _FAILING.get(tracker.name, tracker.finish))
            self._trackers = []


def configuration(recipe: Recipe, plan: Plan) -> dict[str, bool | int | float | str]:
    """Every value of the recipe by its dotted key, and what the plan decides as `plan.…`.

    Lists are written as JSON, and null as the word: TensorBoard takes numbers and strings only.
    """
    planned = {key: value for key, value in asdict(plan).items() if key in PLANNED}
    return dict(_flat({**recipe.model_dump(mode="json"), "plan": planned}, ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, bool | int | float | str]]:
    found: list[tuple[str, bool | int | float | str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            found.append((f"{prefix}{key}", value if plain else json.dumps(value)))
    return found


def _start_tensorboard(directory: Path, run_name: str) -> Any:
    from accelerate.tracking import TensorBoardTracker

    del run_name  # TensorBoard names a run by its directory
    tracker = TensorBoardTracker("tensorboard", directory)
    tracker.start()
    return tracker


def _start_wandb(directory: Path, run_name: str) -> Any:
    """Offline: `wandb sync` uploads it later. What the user's environment says wins over what is said here."""
    import wandb
    from accelerate.tracking import WandBTracker

    said = os.environ  # given on as arguments: wandb itself reads it once in a process
    tracker = WandBTracker(
        said.get("WANDB_PROJECT", PROJECT),
        mode=said.get("WANDB_MODE", "offline"),
        dir=said.get("WANDB_DIR", directory),
        name=said.get("WANDB_NAME", run_name),
        settings=wandb.Settings(silent="WANDB_SILENT" not in said),  # its lines would break up ours
    )
    try:
        tracker.start()
    except wandb.errors.Error as error:
        raise UserError(f"train.trackers: wandb does not start: {error}") from error
    return tracker


def _start_mlflow(directory: Path, run_name: str) -> Any:
    """Files, unless the user has a server: MLflow asks for a word of consent to them."""
    import mlflow
    from accelerate.tracking import MLflowTracker

    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri((directory / "mlflow").as_uri())
    tracker = MLflowTracker(PROJECT, run_name=os.environ.get("MLFLOW_RUN_NAME", run_name))
    try:
        tracker.start()
    except mlflow.exceptions.MlflowException as error:
        raise UserError(f"train.trackers: mlflow does not start: {error}") from error
    return tracker


def _fail_wandb() -> None:
    import wandb

    wandb.finish(exit_code=1)


def _fail_mlflow() -> None:
    import mlflow

    mlflow.end_run("FAILED")


_STARTS = {"tensorboard": _start_tensorboard, "wandb": _start_wandb, "mlflow": _start_mlflow}
_FAILING = {"wandb": _fail_wandb, "mlflow": _fail_mlflow}
