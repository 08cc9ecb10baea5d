"""The commands: parse, call, print; a module for each group of them, which this one puts together.

Heavy libraries are imported inside the commands, so that `--help` is quick.
"""

import sys
from typing import Annotated

import typer

from shardlab import __version__
from shardlab.cli import checkpoints, data
from shardlab.cli.compression import fit, prune, quantize
from shardlab.cli.diagnosis import doctor
from shardlab.cli.distillation import distill
from shardlab.cli.models import evaluate, export, generate, merge
from shardlab.cli.planning import plan, tune
from shardlab.cli.training import compare, init, train

app = typer.Typer(
    name="shardlab",
    help="Train a model that does not fit, on the machines you have; then shrink it until it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """The program. Ends the process with the exit codes of `errors.ExitCode`."""
    from shardlab.runtime.child import run_rank

    sys.exit(run_rank(lambda: app(standalone_mode=True)))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardlab {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="What `deepspeed` adds; not needed.")
    ] = 0,
) -> None:
    del version, local_rank


# In the order of `--help`.
app.command()(init)
app.command()(train)
app.command()(plan)
app.command()(tune)
app.command()(compare)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command()(merge)
app.command()(distill)
app.command()(prune)
app.command()(quantize)
app.command()(fit)
app.command()(export)
app.command()(doctor)
app.add_typer(data.app, name="data")
app.add_typer(checkpoints.app, name="checkpoint")
