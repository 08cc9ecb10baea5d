"""Starting a job: as a rank of a launcher's, in this process, or as ranks of our own launcher."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlab.errors import UserError
from shardlab.plan import Plan
from shardlab.planner import resolve
from shardlab.recipe import Recipe
from shardlab.runtime.extensions import zero_unavailable_reason
from shardlab.topology import announced_rank, launcher_name
from shardlab.train.tracking import check_trackers

RUNS = Path("runs")


def start(
    recipe: Recipe, nproc: int | None, output: Path, arguments: Sequence[str], run: Callable[[], int | None]
) -> int | None:
    """Call `run` as a rank, or start `nproc` ranks of `shardlab ARGUMENTS` on this host; return the exit code.

    Under a launcher this process is a rank already, and `nproc` is only what `run` expects. Raises UserError, before
    any process is started, for a recipe that can't run on that many ranks, and for an output that is taken.
    """
    if under_launcher():
        return run()
    count = nproc or 1
    check(recipe, count)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} holds another run; choose another --output, or remove it")
    if count == 1:
        return run()
    from shardlab.runtime.launch import launch

    return launch([sys.executable, "-m", "shardlab", *arguments], count)


def check(recipe: Recipe, world_size: int) -> Plan:
    """The plan for `world_size` ranks. Raises UserError for what would only fail once the ranks have started."""
    plan = resolve(recipe, world_size=world_size)
    check_trackers(recipe)
    if plan.backend.startswith("zero"):
        missing = zero_unavailable_reason(())
        if missing is not None:
            raise UserError(missing)
    return plan


def under_launcher() -> bool:
    """Whether torchrun, accelerate, deepspeed or our own launcher has started this process."""
    return launcher_name() != "none" or announced_rank()[1] > 1


def default_output(recipe_file: Path) -> Path:
    """runs/NAME, or the first runs/NAME-2, -3, ... that is free. Raises UserError under a launcher.

    There the ranks would each look for a free name, and find others.
    """
    if under_launcher():
        raise UserError("under a launcher --output has to be given: the ranks must agree on it")
    name, number = recipe_file.stem, free_name(recipe_file.stem)
    return RUNS / (name if number == 1 else f"{name}-{number}")


def free_name(name: str) -> int:
    """1 where runs/NAME is free, else the smallest N for which runs/NAME-N is."""
    number, path = 1, RUNS / name
    while path.exists():
        number += 1
        path = RUNS / f"{name}-{number}"
    return number
