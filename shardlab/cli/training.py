"""`init`, `train` and `compare`: from a recipe to trained models."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.options import Json, Output, Overrides, RecipeFile, to_stderr


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe with every key, its default and what it does.

    Example: `shardlab init my.yaml && shardlab train my.yaml --nproc 2`
    """
    from shardlab.recipe.template import write_template

    write_template(path)
    typer.echo(f"wrote {path}; next: shardlab train {path}")


def train(
    recipe: RecipeFile,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here; under another launcher, the ranks to expect.")
    ] = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|DIR", help="Go on from the newest whole checkpoint of --output, or of DIR."),
    ] = None,
    reset_schedule: Annotated[
        bool, typer.Option("--reset-schedule", help="With --resume: the recipe's schedule from there on.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="After a failure start the ranks again and resume, so many times.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve and print everything, train nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe.

    TERM or USR1 to any rank saves a checkpoint after the step under way and ends with code 75; a second one aborts.

    Examples: `shardlab train recipe.yaml --nproc 2`, `shardlab train recipe.yaml --set train.steps=50`,
    `torchrun --nproc-per-node 2 -m shardlab train recipe.yaml --output runs/a`,
    `shardlab train recipe.yaml --output runs/a --resume auto --nproc 4 --set shard.backend=zero3`
    """
    from shardlab.errors import UserError
    from shardlab.recipe import load_recipe
    from shardlab.train.start import check, default_output, start

    loaded = load_recipe(recipe, overrides or ())
    if dry_run:
        _print_plan(loaded, check(loaded, nproc or loaded.shard.world_size or 1), as_json)
        return
    if resume == "auto" and output is None:
        raise UserError("--resume auto needs --output: the run to go on with")
    if reset_schedule and resume is None:
        raise UserError("--reset-schedule is for a run that goes on: give --resume too")
    directory = output if output is not None else default_output(recipe)

    def run() -> None:
        from shardlab.train.run import train as train_here

        summary = train_here(
            loaded,
            directory,
            world_size=nproc,
            resume=resume,
            reset_schedule=reset_schedule,
            say=to_stderr if as_json else typer.echo,
        )
        if as_json and summary is not None:
            typer.echo(json.dumps(summary))

    arguments = ["train", str(recipe), "--output", str(directory), *(f"--set={o}" for o in overrides or ())]
    arguments += [f"--nproc={nproc}"] if nproc is not None else []
    arguments += [f"--resume={resume}"] if resume is not None else []
    arguments += ["--reset-schedule"] if reset_schedule else []
    arguments += ["--json"] if as_json else []
    code = start(loaded, nproc, directory, arguments, run, resume=resume, max_restarts=max_restarts)
    raise typer.Exit(code or 0)


def compare(
    recipe: RecipeFile,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks of each sharded run.")] = 2,
    backends: Annotated[
        str | None, typer.Option(help="Which, separated by commas. [default: ddp,zero1,zero2,zero3,fsdp]")
    ] = None,
    overrides: Overrides = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train the same recipe on one process and on each backend, and show that the losses agree.

    Example: `shardlab compare recipe.yaml --nproc 2 --set train.steps=20`
    """
    from shardlab.recipe import load_recipe
    from shardlab.train import compare as comparing
    from shardlab.train.start import default_output

    loaded = load_recipe(recipe, overrides or ())
    chosen = comparing.parse_backends(backends)
    rows = list(comparing.compare(loaded, nproc, output or default_output(recipe), chosen))
    typer.echo(json.dumps([vars(row) for row in rows]) if as_json else comparing.table(rows))


def _print_plan(recipe: Any, plan: Any, as_json: bool) -> None:
    import dataclasses

    from shardlab.planner import describe
    from shardlab.recipe import dump_recipe

    if as_json:
        typer.echo(json.dumps({"recipe": recipe.model_dump(mode="json"), "plan": dataclasses.asdict(plan)}))
    else:
        typer.echo(f"{dump_recipe(recipe)}\n{describe(plan)}")
