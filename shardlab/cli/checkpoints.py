"""`checkpoint …`: training state on disk, looked at, verified and converted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli.options import Json

app = typer.Typer(
    help="Look at the checkpoints of a run, and verify them.", no_args_is_help=True, rich_markup_mode="markdown"
)

Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint; or a run, whose newest one is meant.")]


@app.command(name="list")
def list_checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")], as_json: Json = False
) -> None:
    """The checkpoints of a run: step, size, what saved them, evaluation loss.

    Example: `shardlab checkpoint list runs/demo`
    """
    import dataclasses

    from shardlab.checkpoint.inspect import rows

    found = rows(run)
    typer.echo(
        json.dumps([dataclasses.asdict(row) for row in found]) if as_json else "\n".join(r.text() for r in found)
    )


@app.command(name="inspect")
def inspect_checkpoint(directory: Checkpoint, as_json: Json = False) -> None:
    """What a checkpoint holds: tensors with shapes and types, optimizer state, schedule, cursor, what wrote it.

    Example: `shardlab checkpoint inspect runs/demo/checkpoints/step-00000100`
    """
    from shardlab.checkpoint.inspect import as_dict, chosen, describe

    path = chosen(directory)
    typer.echo(json.dumps(as_dict(path)) if as_json else "\n".join(describe(path)))


@app.command(name="verify")
def verify_checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run, all of whose checkpoints are read, or one.")],
    as_json: Json = False,
) -> None:
    """Read every byte and compare it with what was written.

    Ends with code 2 if anything is damaged, and names it.

    Example: `shardlab checkpoint verify runs/demo`
    """
    from shardlab.checkpoint.inspect import verify_all
    from shardlab.errors import UserError

    found = verify_all(directory)
    if as_json:
        typer.echo(json.dumps(found))
    faults = [fault for row in found for fault in row["faults"]]
    if faults:
        damaged = sum(bool(row["faults"]) for row in found)
        raise UserError(f"{damaged} of {len(found)} checkpoints damaged: {'; '.join(faults)}")
    if not as_json:
        typer.echo("\n".join(f"{row['path']}: whole" for row in found))


@app.command(name="export")
def export_checkpoint(
    directory: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    dtype: Annotated[str, typer.Option(help="auto (what the run computed in), bf16 or fp32.")] = "auto",
    like: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model directory to take config and tokenizer from.")
    ] = None,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory (of a run with adapters: an adapter directory).

    Example: `shardlab checkpoint export runs/demo model --dtype bf16`
    """
    from shardlab.checkpoint.export import export, parse_dtype
    from shardlab.checkpoint.inspect import chosen

    export(chosen(directory), output, parse_dtype(dtype), like)
    typer.echo(f"model: {output}")


@app.command(name="convert")
def convert_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A checkpoint of DeepSpeed ZeRO (stages 0 to 3) or PyTorch DCP, a model directory; with --to, ours.",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Where to make the checkpoint, in a new directory.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="dcp|zero3", help="Write another tool's checkpoint: PyTorch DCP's, or ZeRO-3's."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="With --to zero3: how many ranks load it.")
    ] = None,
) -> None:
    """Another tool's checkpoint as one of ours, to go on from at any backend and world size; or ours as another's.

    Nothing that a file brings is run.

    Example: `shardlab checkpoint convert deepspeed-run converted`, then `shardlab train recipe.yaml --resume converted
    --reset-schedule`; and back: `shardlab checkpoint convert runs/demo deepspeed-run --to zero3 --world-size 2`
    """
    from shardlab.checkpoint.convert import convert
    from shardlab.checkpoint.convert_to import convert_to
    from shardlab.checkpoint.inspect import chosen
    from shardlab.errors import UserError

    if to is None and world_size is not None:
        raise UserError("--world-size is of --to zero3: a checkpoint of ours goes on at any number of ranks")
    if to is None:
        typer.echo(f"checkpoint: {convert(source, output)}")
        return
    convert_to(chosen(source), output, to, world_size)
    typer.echo(f"checkpoint: {output}")


@app.command(name="diff")
def diff_checkpoints(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Which tensors of two checkpoints differ, and by how much; how they are sharded does not matter.

    Ends with code 1 if anything differs, as `diff` does.

    Example: `shardlab checkpoint diff runs/a runs/b`
    """
    from shardlab.checkpoint.diff import differences
    from shardlab.checkpoint.inspect import chosen

    found = list(differences(chosen(first), chosen(second)))
    if as_json:
        typer.echo(json.dumps([difference.as_dict() for difference in found]))
    else:
        typer.echo("\n".join(difference.text() for difference in found) or "the same, bit for bit")
    raise typer.Exit(1 if found else 0)
