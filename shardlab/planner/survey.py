"""`shardlab plan`: its arguments -> a survey."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from shardlab.errors import UserError
from shardlab.plan import Loop
from shardlab.planner.choose import choose, is_open
from shardlab.planner.machine import Machine, parse_hardware, this_machine
from shardlab.planner.resolve import resolve
from shardlab.planner.search import Survey, assess, laid_out, predictor, survey
from shardlab.recipe import Recipe, load_recipe

SEQUENCES_PER_RANK = 8  # in a step, where no recipe says


def survey_for(
    recipe_file: Path | None,
    overrides: Sequence[str],
    model: Path | None,
    sequence_length: int | None,
    ranks: int | None,
    hardware: str | None,
    hardware_file: Path | None,
    loop: Loop = "shardlab",
    disk_tbw: float | None = None,
) -> Survey:
    """`disk_tbw`: terabytes that the disk is rated to take, instead of the hardware's figure.

    Raises UserError where neither a recipe nor a model is given, and for what the recipe or the hardware lacks.
    """
    if recipe_file is None and model is None:
        raise UserError("give a recipe, or --model with a model directory or a config.json")
    recipe = load_recipe(recipe_file, overrides) if recipe_file is not None else None
    machine = _machine(recipe, ranks, hardware, hardware_file)
    if disk_tbw is not None:
        machine = replace(machine, disk_tbw=disk_tbw)
    if recipe is not None and model is None and sequence_length is None:
        return _of_recipe(recipe, machine, loop)
    return survey(_adapted(recipe, model, sequence_length, machine), machine, loop=loop)


def _of_recipe(recipe: Recipe, machine: Machine, loop: Loop) -> Survey:
    """With the recipe's own plan: what `shardlab train` would run, so what becomes of `auto` there."""
    ruled, predict = resolve(recipe, world_size=machine.ranks), predictor(recipe, machine, loop=loop)
    found = survey(recipe, machine, ruled, predict, loop)
    if loop != "shardlab" or not is_open(recipe, ruled):
        return found
    return replace(found, own=assess(laid_out(choose(found, ruled), predict, machine), predict, machine))


def _machine(recipe: Recipe | None, ranks: int | None, hardware: str | None, file: Path | None) -> Machine:
    if hardware is not None:
        machine = parse_hardware(hardware, file)
        return machine if ranks is None else machine.with_ranks(ranks)
    expected = recipe.shard.world_size if recipe is not None else None
    return this_machine(ranks or expected or 1)


def _adapted(recipe: Recipe | None, model: Path | None, sequence_length: int | None, machine: Machine) -> Recipe:
    values: dict[str, Any] = recipe.model_dump(mode="json") if recipe is not None else {}
    if model is not None:
        config = model / "config.json" if model.is_dir() else model
        values["model"] = {"config": str(config)}
    if sequence_length is not None:
        values["data"] = {**values.get("data", {}), "sequence_length": sequence_length}
    if recipe is None:
        values["data"] = {**values.get("data", {}), "tokenizer": "bytes"}
        values["train"] = {"global_batch_size": SEQUENCES_PER_RANK * machine.ranks}
    return Recipe.from_dict(values)


def parse_loop(text: str) -> Loop:
    """Raises UserError for a loop that is not known."""
    loop = next((known for known in get_args(Loop) if known == text), None)
    if loop is None:
        raise UserError(f"--loop {text}: expected {', '.join(get_args(Loop))}")
    return cast(Loop, loop)
