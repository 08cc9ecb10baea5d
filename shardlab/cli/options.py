"""Arguments and options that several commands have, and what they say on stderr."""

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file; see `shardlab init`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override one value of the recipe; may be given again."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="The run's directory. [default: runs/NAME]")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout; the rest goes to stderr.")]


def to_stderr(text: str) -> None:
    """Where --json has stdout to itself."""
    typer.echo(text, err=True)
