"""`doctor`: what is wrong with a machine or a configuration file."""

from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli.options import Json


def doctor(
    ds_config: Annotated[
        Path | None, typer.Option("--ds-config", metavar="FILE", help="Lint this DeepSpeed JSON; nothing is run.")
    ] = None,
    accelerate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lint this accelerate file, alone or with --ds-config.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model (or its config.json) that the files are used with.")
    ] = None,
    parity: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Run two configurations on a tiny model: do they compute the same?"),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks that the files are for, to check batch sizes.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="An unknown key, or a glob of some, that is meant.")
    ] = None,
    self_test: Annotated[bool, typer.Option(help="Train a step on two ranks with every backend.")] = True,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's speed, for `plan` and `tune`; about a minute.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What is wrong with this machine, with a configuration file, or between two configurations.

    Ends with code 1 if a check fails or the two differ, with 2 if a file has errors.

    Examples: `shardlab doctor`, `shardlab doctor --ds-config ds.json --accelerate acc.yaml --model my-model`,
    `shardlab doctor --parity recipe.yaml ds.json`,
    `shardlab doctor --calibrate`
    """
    from shardlab.doctor import report

    if calibrate:
        code = report.calibrate(as_json=as_json, say=typer.echo)
    elif parity is not None:
        code = report.compare(*parity, model, as_json=as_json, say=typer.echo)
    elif ds_config is not None or accelerate is not None:
        code = report.lint(ds_config, accelerate, model, nproc, allow or (), as_json=as_json, say=typer.echo)
    else:
        code = report.examine(self_test=self_test, as_json=as_json, say=typer.echo)
    raise typer.Exit(code)
