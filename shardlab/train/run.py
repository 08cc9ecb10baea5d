"""`shardlab train`: a recipe and a directory -> a trained model, its metrics and its summary."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import __version__
from shardlab.data import OwnData, PreparedData, evaluation_batches, prepare
from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.model.deferred import Weights
from shardlab.planner import describe
from shardlab.recipe import Recipe, dump_recipe
from shardlab.topology import Topology
from shardlab.train.callbacks import Callback
from shardlab.train.engine import Engine
from shardlab.train.metrics import MetricsFile, Progress, spelled

WARM_STEPS = 2  # the first steps make optimizer state and warm caches: left out of the throughput


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    world_size: int | None = None,
    callbacks: Iterable[Callback] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Train by `recipe` on the ranks of this job; the first rank returns the summary, as in `output`/summary.json.

    Every rank calls this, with `callbacks` of its own; the first one tells people what it does through `say`. Raises
    UserError for what the user can mend, before anything is written where possible.
    """
    with Engine.from_recipe(recipe, world_size=world_size, output=output, callbacks=callbacks) as engine:
        return _train(engine, Path(output), say)


def _train(engine: Engine, output: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    recipe, main = engine.recipe, engine.topology.is_main
    data = prepare(recipe.data)
    if main:
        say(describe(engine.plan))
    model, weights = build_from_recipe(engine, data)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    claim(output, engine.topology)
    # Files come after all that may refuse the recipe: an empty directory is free for the next try.
    _setup(engine, data, model, weights)
    del model, weights
    if main:
        say("\n".join([f"{parameters / 1e6:.2f}M parameters; {data.size()} to train on", *data.report.lines()]))
        (output / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        _write_json(output / "plan.json", dataclasses.asdict(engine.plan))
        engine.callbacks += [MetricsFile(output / "metrics.jsonl"), Progress(recipe.train.steps)]
    run = _Run(engine, data)
    run.loop()
    engine.save()
    summary = run.summary() | {
        "parameters": parameters,
        "backend": engine.plan.backend,
        "world_size": engine.plan.world_size,
        "base_memory_bytes": per_rank(engine.base_bytes, engine.topology),
        "peak_memory_bytes": per_rank(run.peak_bytes, engine.topology),
        "data": data.report.as_dict(),
        "model": "model",
        "shardlab": __version__,
    }
    summary = {key: spelled(value) for key, value in summary.items()}
    if main:
        _write_json(output / "summary.json", summary)
        say(f"model: {output / 'model'}\nmetrics: {output / 'metrics.jsonl'}\nsummary: {output / 'summary.json'}")
    return summary if main else None


def setup_from_recipe(engine: Engine, data: PreparedData | OwnData) -> int:
    """Build the recipe's model for the data's tokenizer and shard it. Returns its number of parameters."""
    model, weights = build_from_recipe(engine, data)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _setup(engine, data, model, weights)
    return parameters


def _setup(engine: Engine, data: PreparedData | OwnData, model: nn.Module, weights: Weights) -> None:
    packed = engine.recipe.data.packing and isinstance(data, PreparedData)
    engine.setup(model, weights, engine.recipe.train.optimizer, data.tokenizer, packed=packed)


def build_from_recipe(engine: Engine, data: PreparedData | OwnData) -> tuple[nn.Module, Weights]:
    """The recipe's model for the data's tokenizer, and its initial values; nothing is sharded yet."""
    recipe, tokenizer = engine.recipe, data.tokenizer
    return build_model(
        recipe.model,
        vocabulary=len(tokenizer) if tokenizer is not None else 0,
        eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,
        sequence_length=recipe.data.sequence_length,
        seed=engine.plan.seed,
    )


def claim(output: Path, topology: Topology) -> None:
    """Make the run's directory. Raises UserError on every rank if it holds anything: a run is never overwritten."""
    taken = torch.zeros(1, device=topology.device)
    if topology.is_main:
        taken[0] = output.exists() and (not output.is_dir() or any(output.iterdir()))
        if not taken[0]:
            output.mkdir(parents=True, exist_ok=True)
    if topology.world_size > 1:
        dist.broadcast(taken, 0)
    if taken[0]:
        raise UserError(f"{output} holds another run; choose another --output, or remove it")


def per_rank(value: int, topology: Topology) -> list[int]:
    """`value` of each rank, on every rank."""
    values = torch.zeros(topology.world_size, dtype=torch.int64, device=topology.device)
    values[topology.rank] = value
    if topology.world_size > 1:
        dist.all_reduce(values)
    return [int(value) for value in values]


class _Run:
    """The loop and what it keeps for the summary."""

    def __init__(self, engine: Engine, data: PreparedData | OwnData):
        self._engine = engine
        self._data = data
        self.peak_bytes = 0  # over the steps, not over building the model before or writing it after
        self._rates: list[float] = []
        self._losses: list[float | None] = []
        self._evaluation: tuple[float, int] | None = None
        self._seconds = 0.0

    def loop(self) -> None:
        """All steps, with evaluations between them and at the end."""
        engine, train = self._engine, self._engine.recipe.train
        plan, topology = engine.plan, engine.topology
        loader = self._data.windows(
            global_batch_size=plan.global_batch_size,
            micro_batch=plan.micro_batch,
            rank=topology.rank,
            world_size=topology.world_size,
            seed=plan.seed,
            steps=train.steps,
        )
        engine.meter.reset()
        started = time.perf_counter()
        try:
            for window in loader:
                result = engine.run(window)
                last = result.step == train.steps
                if result.step > WARM_STEPS or last:
                    self._rates.append(result.tokens_per_second)
                self._losses.append(result.loss)
                if last or (train.evaluate_every is not None and result.step % train.evaluate_every == 0):
                    self._evaluate()
        finally:
            self._seconds = time.perf_counter() - started
            self.peak_bytes = engine.meter.peak_bytes()

    def _evaluate(self) -> None:
        if self._data.evaluation is None:
            return
        plan, topology = self._engine.plan, self._engine.topology
        batches = evaluation_batches(
            self._data.evaluation, micro_batch=plan.micro_batch, rank=topology.rank, world_size=topology.world_size
        )
        self._evaluation = self._engine.evaluate(batches)

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        loss, tokens = self._evaluation if self._evaluation is not None else (None, 0)
        return {
            "steps": len(self._losses),
            "applied": self._engine.applied,
            "nonfinite_steps": self._engine.nonfinite_steps,
            "loss": self._losses[-1],
            "evaluation_loss": loss,
            "evaluation_tokens": tokens,
            "tokens_per_second": statistics.median(self._rates),
            "seconds": self._seconds,
        }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
