"""`shardlab doctor --parity A B`: do two configurations compute the same?

Both train the same tiny model on the same data for a few steps, on two ranks. Once with plain SGD, whose update is the
gradient as it is after averaging, clipping and rounding; and, where a file brings an optimizer or a schedule, once more
as the files say (after Adam a wrong factor in the gradient can hardly be seen).
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardlab.doctor import batches
from shardlab.doctor.configuration import Configuration
from shardlab.doctor.ranks import RankJob
from shardlab.doctor.translate import read_configuration
from shardlab.doctor.verdict import Pass, Verdict, judge
from shardlab.errors import ExitCode, UserError
from shardlab.runtime.extensions import zero_unavailable_reason

STEPS = 3
TIMEOUT_SECONDS = 600.0
PROBE, FULL = "plain SGD", "the files' optimizers"
# A rate at which weights move by about their own size: differences show in three steps.
_PROBE_OPTIMIZER: dict[str, Any] = {"name": "sgd", "lr": 0.5}
_CONSTANT: dict[str, Any] = {"name": "constant", "warmup_steps": 0}


def compare(
    a: Path,
    b: Path,
    model: Mapping[str, Any] | None = None,
    *,
    steps: int = STEPS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Verdict:
    """Run both configurations and say whether they compute the same.

    `model` is the config.json of the model whose tiny sibling is trained; without it that of a recipe, or a Llama.
    Raises UserError for a file that can't be run here, or that DeepSpeed refuses.
    """
    sides = (read_configuration(a), read_configuration(b))
    if any(side.kind == "ds_config" or side.backend.startswith("zero") for side in sides):
        missing = zero_unavailable_reason()
        if missing is not None:
            raise UserError(missing)
    unlike = batches.difference(*sides)
    if unlike is not None:
        return Verdict(False, unlike, sides)
    sides = _comparable(*batches.agree(*sides))
    passes = [_probe(sides)]
    if any(side.optimizer or side.own_optimizer or side.schedule or side.own_schedule for side in sides):
        passes.append(_full(sides))
    config = model or sides[0].model or sides[1].model
    spec = {"model": config, "steps": steps, "passes": [asdict(one) for one in passes]}
    with tempfile.TemporaryDirectory(prefix="shardlab-") as directory:
        _run(spec, Path(directory), sides, timeout_seconds)
        return judge(Path(directory), sides, [one.name for one in passes], steps)


def _comparable(a: Configuration, b: Configuration) -> tuple[Configuration, Configuration]:
    """Without what only one side says and the other can't be given: DeepSpeed's own schedulers, and rare optimizers."""

    def fitted(side: Configuration, other: Configuration) -> Configuration:
        config, notes = dict(side.ds_config or {}), list(side.notes)
        schedule, optimizer = side.own_schedule, side.own_optimizer
        if schedule and not other.own_schedule and other.schedule is None:
            del config["scheduler"]
            schedule = False
            notes.append("scheduler: left out, for the other file says nothing of the kind")
        if optimizer and side.optimizer is None and not other.own_optimizer and other.optimizer is None:
            del config["optimizer"]
            optimizer = False
            notes.append("optimizer: left out, for the other file says nothing of the kind")
        if side.ds_config is None:
            return side
        return replace(side, ds_config=config, own_schedule=schedule, own_optimizer=optimizer, notes=tuple(notes))

    return fitted(a, b), fitted(b, a)


def _probe(sides: tuple[Configuration, Configuration]) -> Pass:
    def plain(side: Configuration) -> Configuration:
        config = side.ds_config
        if config is not None:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        return replace(
            side,
            ds_config=config,
            optimizer=_PROBE_OPTIMIZER,
            schedule=_CONSTANT,
            own_optimizer=False,
            own_schedule=False,
        )

    return Pass(PROBE, (plain(sides[0]), plain(sides[1])))


def _full(sides: tuple[Configuration, Configuration]) -> Pass:
    """What one file does not say is the other's; what neither says is AdamW at a constant rate."""

    def with_others(side: Configuration, other: Configuration) -> Configuration:
        optimizer = side.optimizer or other.optimizer or {"name": "adamw"}
        schedule = side.schedule or other.schedule or _CONSTANT
        steps = side.steps if side.schedule else other.steps
        return replace(side, optimizer=optimizer, schedule=schedule, steps=steps)

    a, b = sides
    return Pass(FULL, (with_others(a, b), with_others(b, a)))


def _run(spec: dict[str, Any], directory: Path, sides: tuple[Configuration, ...], timeout_seconds: float) -> None:
    (directory / "spec.json").write_text(json.dumps(spec))
    job = RankJob("shardlab.doctor.parity_job", [str(directory)], nproc=batches.RANKS, timeout_seconds=timeout_seconds)
    with job as running:
        ended = running.wait()
    if ended.done:
        return
    under_way = (directory / "under-way").read_text() if (directory / "under-way").exists() else ""
    where = sides[int(under_way)].file if under_way else f"{sides[0].file}, {sides[1].file}"
    if ended.code == ExitCode.USER:
        raise UserError(f"{where}: {ended.cause.removeprefix('error: ')}")
    raise UserError(f"{where}: does not run here: {ended.cause}")
