"""`plan` and `tune`: what fits and which way to take, by prediction and by trial."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli.options import Json, Overrides, RecipeFile, to_stderr, uncollected


def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe, a YAML file; or give --model.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model directory or config.json, instead of a recipe's model.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence, instead of the recipe's.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "--world-size", min=1, help="Ranks. [default: the hardware's, or 1]")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="Such as 8xH100-80G, or 2x8xH100-80G. [default: this machine]")
    ] = None,
    hardware_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file with more hardware to name.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every micro-batch, not only the largest that fits.")] = False,
    loop: Annotated[
        str, typer.Option(help="Whose loop: shardlab, hf (plain transformers, autocast) or hf-bf16 (bf16 weights).")
    ] = "shardlab",
    emit: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the chosen plan's files for other launchers there.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say of each other plan why it was not chosen.")] = False,
    disk_tbw: Annotated[
        float | None,
        typer.Option("--disk-tbw", min=1e-6, metavar="TB", help="Terabytes that the disk may be written."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The ways to train a model on given machines: predicted memory and time, what fits, and which to take.

    Needs no GPU and reads no weights.

    Examples: `shardlab plan recipe.yaml --nproc 2`, `shardlab plan recipe.yaml --hardware 2x8xH100-80G --explain`,
    `shardlab plan --model my-model --seq 4096 --hardware 8xA100-80G --json`,
    `shardlab plan recipe.yaml --nproc 2 --emit planned`, `shardlab plan recipe.yaml --loop hf --emit planned`
    """
    with uncollected():
        from shardlab.planner import handover, show
        from shardlab.planner.survey import parse_loop, survey_for

    found = survey_for(recipe, overrides or (), model, seq, nproc, hardware, hardware_file, parse_loop(loop), disk_tbw)
    typer.echo(json.dumps(show.as_dict(found)) if as_json else show.text(found, every=every, explain=explain))
    if emit is not None:
        written = ", ".join(str(path) for path in handover.write_files(emit, found))
        typer.echo(f"written: {written}", err=as_json)


def tune(
    recipe: RecipeFile,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks to start here. [default: the recipe's, or 1]")] = None,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to measure besides the recipe's own.")] = 5,
    steps: Annotated[int, typer.Option(min=3, help="Optimizer steps of each; the first two are not timed.")] = 6,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="The longest a plan is tried.")] = 900.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The tuned recipe. [default: RECIPE-tuned.yaml beside it]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try the fastest plans for a few real steps, and write the recipe with the one that was fastest.

    A plan that runs out of memory or fails is noted, and the next one is tried; where all fail the code is 2.

    Examples: `shardlab tune recipe.yaml --nproc 2`, `shardlab tune recipe.yaml --top 3 --output fast.yaml`
    """
    from shardlab.errors import UserError
    from shardlab.planner.survey import survey_for
    from shardlab.train import tune as tuning
    from shardlab.train.start import under_launcher

    if under_launcher():
        raise UserError("tune starts ranks of its own: run it without a launcher, with --nproc")
    file = output or recipe.with_name(f"{recipe.stem}-tuned.yaml")
    if file.exists():
        raise UserError(f"{file} exists already; choose another --output, or remove it")
    say = to_stderr if as_json else typer.echo
    found = survey_for(recipe, overrides or (), None, None, nproc, None, None)
    tried = []
    for trial in tuning.trials(found, tuning.tried_on_ranks(found.recipe, steps, limit), top):
        tried.append(trial)
        say(tuning.line(trial))
    chosen = tuning.best(tried)
    if as_json:
        typer.echo(json.dumps(tuning.as_dict(tried) | {"output": str(file) if chosen is not None else None}))
    if chosen is None:
        raise UserError(tuning.nothing_ran(found, tried))
    file.write_text(tuning.tuned(found.recipe, tried), encoding="utf-8")
    ranks = chosen.plan.world_size
    say(f"fastest: {tuning.line(chosen)}\nwrote {file}; next: shardlab train {file} --nproc {ranks}")
