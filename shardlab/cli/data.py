"""`data …`: a look at what a recipe trains on."""

import json
import sys
from typing import Annotated

import typer

from shardlab.cli.options import Json, Overrides, RecipeFile

app = typer.Typer(help="Look at the data of a recipe.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
def inspect(
    recipe: RecipeFile,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show as the model gets them.")] = 3,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show decoded rows with what is not learned marked, the lengths, what packing saves, and every bad record's place.

    Ends with code 2 if training would refuse the records.

    Examples: `shardlab data inspect recipe.yaml --rows 5`,
    `shardlab data inspect recipe.yaml --set data.on_bad_record=skip --json`
    """
    from shardlab.data.inspection import inspect_data
    from shardlab.errors import UserError
    from shardlab.recipe import load_recipe

    found = inspect_data(load_recipe(recipe, overrides or ()).data, rows)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        typer.echo(found.text(_dim) if sys.stdout.isatty() else found.text())
    if found.refusal is not None:
        raise UserError(found.refusal)


def _dim(text: str) -> str:
    return typer.style(text, dim=True)
