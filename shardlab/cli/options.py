"""Arguments and options that several commands have, and what they say on stderr."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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

Speed = Annotated[
    bool, typer.Option("--speed", help="Measure speed and memory before and after, in processes of their own.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="With --speed. [default: as many as torch takes]")]


def to_stderr(text: str) -> None:
    """Where --json has stdout to itself."""
    typer.echo(text, err=True)


def speed_into_card(source: Path, output: Path, threads: int | None) -> dict[str, Any]:
    """How fast both run here: kept in `output`'s card, if it is a directory; the figures."""
    from shardlab.compress.card import add_figures
    from shardlab.export.speed import SpeedConfig, measure_speed, speed_figures

    config = SpeedConfig(threads=threads)
    figures = speed_figures(measure_speed(source, config), measure_speed(output, config))
    if output.is_dir():
        add_figures(output, figures)
    return figures


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports of heavy libraries: what they make stays, and looking through it for garbage took a fifth of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
