"""`plan`: what fits, and which way to take."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli.options import Json, Overrides


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
    as_json: Json = False,
) -> None:
    """The ways to train a model on given machines: predicted memory and time, what fits, and which to take.

    Needs no GPU and reads no weights.

    Examples: `shardlab plan recipe.yaml --nproc 2`, `shardlab plan recipe.yaml --hardware 2x8xH100-80G --explain`,
    `shardlab plan --model my-model --seq 4096 --hardware 8xA100-80G --json`,
    `shardlab plan recipe.yaml --nproc 2 --emit planned`, `shardlab plan recipe.yaml --loop hf --emit planned`
    """
    from shardlab.planner import handover, show
    from shardlab.planner.survey import parse_loop, survey_for

    found = survey_for(recipe, overrides or (), model, seq, nproc, hardware, hardware_file, parse_loop(loop))
    typer.echo(json.dumps(show.as_dict(found)) if as_json else show.text(found, every=every, explain=explain))
    if emit is not None:
        written = ", ".join(str(path) for path in handover.write_files(emit, found))
        typer.echo(f"written: {written}", err=as_json)
