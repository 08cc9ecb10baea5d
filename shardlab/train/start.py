"""Starting a job: as a rank of a launcher's, in this process, or as ranks of our own launcher."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlab.errors import UserError
from shardlab.plan import Plan
from shardlab.planner import resolve
from shardlab.recipe import Recipe
from shardlab.runtime.extensions import zero_unavailable_reason
from shardlab.runtime.stopping import REQUEST
from shardlab.topology import announced_rank, launcher_name
from shardlab.train.tracking import check_trackers

RUNS = Path("runs")
_KILLED = 128 + signal.SIGKILL


def start(
    recipe: Recipe,
    nproc: int | None,
    output: Path,
    arguments: Sequence[str],
    run: Callable[[], int | None],
    *,
    resume: str | None = None,
    max_restarts: int = 0,
) -> int | None:
    """Call `run` as a rank, or start `nproc` ranks of `shardlab ARGUMENTS` on this host; return the exit code.

    Under a launcher this process is a rank already, and `nproc` is only what `run` expects. Raises UserError, before
    any process is started, for a recipe that can't run on that many ranks, and for an output that is taken. After a
    failure ranks that were started here start again, `max_restarts` times, and resume.
    """
    if under_launcher():
        REQUEST.listen()
        return run()
    count = nproc or 1
    check(recipe, count)
    if is_taken(output, resume):
        raise UserError(taken_message(output, resume))
    if count == 1 and not max_restarts:
        REQUEST.listen()  # only where a run looks at it: our launcher has handlers of its own
        return run()
    from shardlab.runtime.launch import launch

    command = [sys.executable, "-m", "shardlab", *arguments]
    since = time.time()
    resumed = [argument for argument in command if not argument.startswith("--resume")]
    code = launch(
        command,
        count,
        stop_grace_seconds=recipe.checkpoint.grace_seconds,
        max_restarts=max_restarts,
        restart_command=[*resumed, "--resume=auto"],
    )
    if code == _KILLED:
        from shardlab.train.after_a_kill import after_a_kill

        explanation = after_a_kill(recipe, output, since)
        if explanation is not None:
            print(explanation, file=sys.stderr, flush=True)
    return code


def is_taken(output: Path, resume: str | None) -> bool:
    """Whether a run must not write into `output`: it holds something, and not a run that is to go on."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if resume is None or not output.is_dir() or (output / "model").exists():
        return True
    goes_on = resume == "auto" or output.resolve() in (Path(resume).resolve(), *Path(resume).resolve().parents)
    return not (goes_on and (output / "recipe.yaml").exists())


def taken_message(output: Path, resume: str | None) -> str:
    """What to say then."""
    if resume is not None and (output / "model").exists():
        return f"{output} holds a finished run; to train it further give another --output, and --resume {output}"
    return f"{output} holds another run; choose another --output, or remove it"


def check(recipe: Recipe, world_size: int) -> Plan:
    """The plan for `world_size` ranks. Raises UserError for what would only fail once the ranks have started."""
    plan = resolve(recipe, world_size=world_size)
    check_trackers(recipe)
    if plan.backend.startswith("zero"):
        missing = zero_unavailable_reason()
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
