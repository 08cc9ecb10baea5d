"""A rank that the system killed says nothing: what its run's plan had predicted is told for it."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardlab.errors import UserError
from shardlab.plan import Offload, Plan, Stream
from shardlab.planner.machine import this_machine
from shardlab.planner.names import gib
from shardlab.planner.search import predictor
from shardlab.recipe import Recipe
from shardlab.train.foresight import as_dict

PLAN_FILE, FORESEEN = "plan.json", "foreseen"  # of a run's directory, and its key for what was known beforehand


def after_a_kill(recipe: Recipe, output: Path, since: float) -> str | None:
    """What the plan had predicted, of the run in `output`; of a small one, traced only now, what it would have.

    Read from what the run wrote before its weights were made: None where it did not come to that after `since`, in
    seconds since the epoch.
    """
    file = output / PLAN_FILE
    try:
        told = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_mtime >= since else {}
    except (OSError, ValueError):
        return None
    foreseen = told.get(FORESEEN)
    if foreseen is None:
        return None
    has, predicted, when = foreseen["memory_bytes"], foreseen["predicted"], "had predicted"
    if predicted is None:
        predicted, when = _predicted(recipe, _plan(told), foreseen["vocabulary"]), "predicts"
    if predicted is None:
        return (
            f"the plan ({foreseen['plan']}) has {gib(foreseen['state_bytes'])} GiB of state a rank, and there are "
            f"{gib(has)} for each: see `shardlab plan` for the rest"
        )
    low, high = (size + predicted["libraries"] for size in (predicted["surely"], predicted["highest"]))
    text = (
        f"the plan ({foreseen['plan']}) {when} {gib(low)} to {gib(high)} GiB a rank at most, in the "
        f"{predicted['where']}; there are {gib(has)} for each"
    )
    return text if high <= has else f"{text}: see `shardlab plan` for what fits"


def _plan(told: dict[str, Any]) -> Plan:
    values = {field.name: told[field.name] for field in fields(Plan)}
    return Plan(**{**values, "offload": Offload(**told["offload"]), "stream": Stream(**told["stream"])})


def _predicted(recipe: Recipe, plan: Plan, vocabulary: int) -> dict[str, Any] | None:
    try:
        return as_dict(predictor(recipe, this_machine(plan.world_size), vocabulary).footprint(plan))
    except UserError:  # rows of a builder's own, or a model that has no trace
        return None
