"""`shardlab train`: a recipe and a directory -> a trained model, its metrics and its summary."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import __version__
from shardlab.data import OwnData, PreparedData, Window, evaluation_batches, prepare
from shardlab.errors import ExitCode, UserError
from shardlab.model.build import build_model
from shardlab.model.cached_teacher import CachedTeacher
from shardlab.model.deferred import Weights
from shardlab.model.qat import command
from shardlab.model.teacher import Distillation
from shardlab.planner import describe
from shardlab.recipe import Recipe, dump_recipe
from shardlab.runtime.stopping import REQUEST
from shardlab.state.masks import kept_masks
from shardlab.topology import Topology
from shardlab.train.after_a_kill import FORESEEN, PLAN_FILE
from shardlab.train.callbacks import Callback
from shardlab.train.checkpointing import (
    DIRECTORY,
    Checkpoints,
    check_resumption,
    data_identity,
    find_resumption,
    restore,
)
from shardlab.train.engine import Engine
from shardlab.train.foresight import Foresight
from shardlab.train.metrics import MetricsFile, Progress, spelled
from shardlab.train.start import is_taken, taken_message
from shardlab.train.teaching import teaching

WARM_STEPS = 2  # the first steps make optimizer state and warm caches: left out of the throughput


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    world_size: int | None = None,
    callbacks: Iterable[Callback] = (),
    resume: str | None = None,
    reset_schedule: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Train by `recipe` on the ranks of this job; the first rank returns the summary, as in `output`/summary.json.

    Every rank calls this, with `callbacks` of its own; the first one tells people what it does through `say`. `resume`
    is "auto", to go on in `output` from its newest whole checkpoint (from the start where there is none), or the
    directory of a checkpoint or run to go on from; `reset_schedule` then takes the recipe's schedule, whatever the
    checkpoint's was. Raises UserError for what the user can mend, before anything is written where possible, and
    SystemExit with `ExitCode.STOPPED` after a signal on which the state was saved.
    """
    with Engine.from_recipe(recipe, world_size=world_size, output=output, callbacks=callbacks) as engine:
        return _train(engine, Path(output), resume, reset_schedule, say)


def _train(
    engine: Engine, output: Path, resume: str | None, reset_schedule: bool, say: Callable[[str], None]
) -> dict[str, Any] | None:
    recipe, main = engine.recipe, engine.topology.is_main
    if not main:
        say = _say_nothing
    data = prepare(recipe.data)
    identity = data_identity(data, recipe)
    found = None
    if resume is not None:
        found = find_resumption(resume, output, engine.ranks, say)
        if found is not None:
            check_resumption(found, engine, identity, reset_schedule=reset_schedule)
    model, weights = build_from_recipe(engine, data)
    teacher = teaching(engine, data, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    vocabulary = len(data.tokenizer) if data.tokenizer is not None else 0
    foresight = Foresight(recipe, engine.plan, engine.topology, vocabulary)
    if teacher is not None:
        say(teacher.describe())
        foresight.teacher = teacher.held
    engine.plan = foresight.choose(model)
    say(describe(engine.plan))
    engine.plan = foresight.fit(model, output, output / DIRECTORY)
    taught = None
    if teacher is not None:
        claim(output, engine.topology, resume=resume, make=False)  # before the teacher speaks, which may take long
        data, taught = teacher.prepare(engine, data, say)
    claim(output, engine.topology, resume=resume)
    # The plan is there before the weights: should the system kill a rank that makes them, it says what was foreseen.
    planned = dataclasses.asdict(engine.plan) | {FORESEEN: foresight.foreseen()}
    if main:
        _write_json(output / PLAN_FILE, planned)
    engine.meter.reset()
    try:
        _setup(engine, data, model, weights, taught)
    except UserError:  # refused after all: an empty directory is free for the next try
        if main and resume is None:
            (output / PLAN_FILE).unlink()
        raise
    del model, weights, teacher, taught
    say("\n".join([f"{parameters / 1e6:.2f}M parameters; {data.size()} to train on", *data.report.lines()]))
    if engine.masks:
        say(f"{engine.masks.counted():,} pruned weights stay zero (model.keep_masks)")
    if found is not None:
        restore(engine, found)
        plan = found.manifest.plan
        say(f"resumed from {found.path}: step {engine.steps_done}, saved by {plan.get('backend', 'another program')}")
    elif resume is not None:
        say(f"{output} holds no checkpoint yet: started from the beginning")
    start = engine.steps_done
    if main:
        (output / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        engine.callbacks += [
            MetricsFile(output / "metrics.jsonl", start),
            Progress(recipe.train.steps, resumed_from=start),
        ]
    parent = str(found.path) if found is not None else None
    checkpoints = Checkpoints(engine, output / DIRECTORY, engine.ranks, identity, parent=parent, say=say)
    checkpoints.prepare()
    run = _Run(engine, data, checkpoints)
    built = per_rank(engine.meter.peak_bytes(), engine.topology)
    stop = run.loop()
    wrote = None
    if stop is None:
        engine.meter.reset()
        engine.save()
        wrote = per_rank(engine.meter.peak_bytes(), engine.topology)
    checkpoints.finish()
    base, peak = per_rank(engine.base_bytes, engine.topology), per_rank(run.peak_bytes, engine.topology)
    around_said = foresight.compare_around(base, built, wrote) if main else None
    predicted, memory = foresight.compare(base, peak) if main else (None, "")
    seconds, time_said = foresight.compare_time(run.seconds_per_step()) if main else (None, None)
    summary = run.summary() | {
        "parameters": parameters,
        "backend": engine.plan.backend,
        "world_size": engine.plan.world_size,
        "resumed_from": {"path": str(found.path), "step": start} if found is not None else None,
        "stopped": None if stop is None else stop.why,
        "base_memory_bytes": base,
        "peak_memory_bytes": peak,
        "building_memory_bytes": built,
        "writing_memory_bytes": wrote,
        "predicted_memory_bytes": predicted,
        "seconds_per_step": run.seconds_per_step(),
        "predicted_seconds_per_step": seconds,
        "data": data.report.as_dict(),
        "model": "model" if stop is None else None,
        "shardlab": __version__,
    }
    summary = {key: spelled(value) for key, value in summary.items()}
    if main:
        _write_json(output / "summary.json", summary)
        foreseen = {key: summary[key] for key in ("predicted_memory_bytes", "predicted_seconds_per_step")}
        _write_json(output / PLAN_FILE, planned | foreseen)
        say(memory)
        if around_said is not None:
            say(around_said)
        if time_said is not None:
            say(time_said)
    if stop is not None:
        say(f"stopped after step {engine.steps_done} ({stop.why}); checkpoint: {stop.checkpoint}")
        say(f"to go on: the same command with --output {output} --resume auto")
        if stop.signalled:
            raise SystemExit(ExitCode.STOPPED)
    else:
        if recipe.train.qat is not None:
            options = command(recipe.train.qat)
            say(f"trained for: shardlab quantize {output / 'model'} OUT {options}")
        say(f"model: {output / 'model'}\nmetrics: {output / 'metrics.jsonl'}\nsummary: {output / 'summary.json'}")
    return summary if main else None


def _say_nothing(text: str) -> None:
    """What ranks but the first tell people."""


def setup_from_recipe(engine: Engine, data: PreparedData | OwnData) -> PreparedData | OwnData:
    """Build the recipe's model for the data's tokenizer and shard it. Returns the data, a teacher's words beside it."""
    model, weights = build_from_recipe(engine, data)
    teacher, taught = teaching(engine, data, model), None
    if teacher is not None:
        data, taught = teacher.prepare(engine, data, _say_nothing)
    _setup(engine, data, model, weights, taught)
    return data


def _setup(
    engine: Engine,
    data: PreparedData | OwnData,
    model: nn.Module,
    weights: Weights,
    taught: tuple[Distillation, Weights] | CachedTeacher | None,
) -> None:
    packed = engine.recipe.data.packing and isinstance(data, PreparedData)
    masks = kept_masks(engine.recipe.model)
    engine.setup(
        model, weights, engine.recipe.train.optimizer, data.tokenizer, packed=packed, masks=masks, teacher=taught
    )


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


def claim(output: Path, topology: Topology, *, resume: str | None = None, make: bool = True) -> None:
    """Make the run's directory. Raises UserError on every rank if it holds anything: a run is never overwritten.

    A run that resumes goes on in its own directory, unless it is finished. Without `make` it is only looked at.
    """
    taken = torch.zeros(1, device=topology.device)
    if topology.is_main:
        taken[0] = is_taken(output, resume)
        if make and not taken[0]:
            output.mkdir(parents=True, exist_ok=True)
    if topology.world_size > 1:
        dist.broadcast(taken, 0)
    if taken[0]:
        raise UserError(taken_message(output, resume))


def per_rank(value: int, topology: Topology) -> list[int]:
    """`value` of each rank, on every rank."""
    values = torch.zeros(topology.world_size, dtype=torch.int64, device=topology.device)
    values[topology.rank] = value
    if topology.world_size > 1:
        dist.all_reduce(values)
    return [int(value) for value in values]


@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last step, and where its state lies."""

    why: str
    checkpoint: Path
    signalled: bool


class _Run:
    """The loop and what it keeps for the summary."""

    def __init__(self, engine: Engine, data: PreparedData | OwnData, checkpoints: Checkpoints):
        self._engine = engine
        self._data = data
        self._checkpoints = checkpoints
        self._first = engine.steps_done
        self.peak_bytes = 0  # over the steps, not over building the model before or writing it after
        self._rates: list[float] = []
        self._step_seconds: list[float] = []
        self._loss: float | None = None
        self._evaluation: tuple[float, int] | None = None
        self._seconds = 0.0

    def loop(self) -> Stop | None:
        """All steps that are left, with evaluations and checkpoints between them; why it stopped early, if it did."""
        engine, train = self._engine, self._engine.recipe.train
        plan, topology = engine.plan, engine.topology
        loader = self._data.windows(
            global_batch_size=plan.global_batch_size,
            micro_batch=plan.micro_batch,
            rank=topology.rank,
            world_size=topology.world_size,
            seed=plan.seed,
            steps=train.steps,
            start_step=self._first,
        )
        engine.meter.reset()
        started = time.perf_counter()
        try:
            for window in loader:
                self._step(window)
                stop = self._stop(engine.steps_done)
                if stop is not None:
                    return stop
        finally:
            self._seconds = time.perf_counter() - started
            self.peak_bytes = engine.meter.peak_bytes()
        return None

    def _step(self, window: Window) -> None:
        train = self._engine.recipe.train
        result = self._engine.run(window)
        last = result.step == train.steps
        if result.step - self._first > WARM_STEPS or last:
            self._rates.append(result.tokens_per_second)
            self._step_seconds.append(result.seconds)
        self._loss = result.loss
        loss = None
        if last or (train.evaluate_every is not None and result.step % train.evaluate_every == 0):
            loss = self._evaluate()
        self._checkpoints.after_step(loss)

    def _stop(self, step: int) -> Stop | None:
        """Save and say why, where the recipe or a signal to any rank asks for it."""
        train = self._engine.recipe.train
        if self._checkpoints.stop_is_asked_for():
            return Stop(f"on {REQUEST.name}", self._checkpoints.save_now(), signalled=True)
        if step == train.stop_after and step < train.steps:
            return Stop(f"train.stop_after {step}", self._checkpoints.save_now(), signalled=False)
        return None

    def _evaluate(self) -> float | None:
        """The loss on the held-out rows, if there are any."""
        if self._data.evaluation is None:
            return None
        plan, topology = self._engine.plan, self._engine.topology
        batches = evaluation_batches(
            self._data.evaluation, micro_batch=plan.micro_batch, rank=topology.rank, world_size=topology.world_size
        )
        self._evaluation = self._engine.evaluate(batches)
        return self._evaluation[0]

    def seconds_per_step(self) -> float | None:
        """The median of the steps that the throughput is of."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        loss, tokens = self._evaluation if self._evaluation is not None else (None, 0)
        return {
            "steps": self._engine.steps_done,
            "applied": self._engine.applied,
            "nonfinite_steps": self._engine.nonfinite_steps,
            "loss": self._loss,
            "evaluation_loss": loss,
            "evaluation_tokens": tokens,
            "tokens_per_second": statistics.median(self._rates) if self._rates else None,
            "seconds": self._seconds,
        }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
