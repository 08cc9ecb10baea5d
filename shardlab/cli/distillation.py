"""`distill`: a smaller model learns from a larger one."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.compression import HeldOut, Source, read_rows_for
from shardlab.cli.options import Json, Overrides, to_stderr


def distill(
    teacher: Source,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The run's directory; the student ends in OUT/model.")],
    student: Annotated[
        str | None,
        typer.Option(metavar="DIR|JSON", help="A model directory to start from, or a config with fresh weights."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Cut the student from the teacher: N blocks.")] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="And N channels in each MLP.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="And N key and value heads, with their queries'.")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="RECIPE", help="How to train: data, steps, rates, backend.")
    ] = None,
    overrides: Overrides = None,
    loss: Annotated[
        str | None, typer.Option(help="forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl. [default: forward_kl]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Softens both distributions. [default: 1]")] = None,
    weight: Annotated[float | None, typer.Option(help="The teacher's share of the loss. [default: 0.5]")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the teacher's likeliest tokens there, written once.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks to start here, or to expect of a launcher.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto|DIR", help="Go on from the newest whole checkpoint of OUT, or of DIR.")
    ] = None,
    calibration: Annotated[int, typer.Option(min=1, help="Rows of text to measure influence with.")] = 128,
    held_out: HeldOut = 128,
    as_json: Json = False,
) -> None:
    """Train a student by a teacher's scores, and say what it has of the teacher.

    The student is another model (`--student`), the teacher's own blocks (`--layers` and its like), or the recipe's
    `model`. OUT is a run as `shardlab train` leaves it: OUT/model is the model directory, with a card.

    Examples: `shardlab distill IN OUT --layers 6 --set train.steps=2000 --nproc 2`,
    `shardlab distill IN OUT --student small.json --recipe recipe.yaml --temperature 2 --loss skew_kl`
    """
    from shardlab.compress.distill import Cut, cut_student, distill_recipe, student_name
    from shardlab.compress.distill import distill as run_here
    from shardlab.errors import UserError
    from shardlab.recipe import load_recipe
    from shardlab.train.start import is_taken, start, taken_message, under_launcher

    cut = Cut(layers, channels, groups)
    if student is not None and cut.steps():
        raise UserError("--student is a model by itself; --layers and its like cut one from the teacher: give one")
    if not (student or cut.steps() or recipe or overrides):
        raise UserError("which student? Give --layers N, --student DIR or JSON, or a recipe with a model")
    given = {"loss": loss, "temperature": temperature, "weight": weight}
    given |= {"cache": None if cache is None else str(cache.absolute())}
    changes = {key: value for key, value in given.items() if value is not None}
    loaded = load_recipe(recipe, overrides or ())
    say = to_stderr if as_json else typer.echo
    made = distill_recipe(loaded, teacher, student, changes)  # what is wrong with it is said before anything is cut
    if cut.steps():
        if under_launcher():
            raise UserError("under a launcher cut the student first (`shardlab prune --method layers`): give --student")
        if is_taken(output, resume):
            raise UserError(taken_message(output, resume))
        student = str(student_name(output))
        data = made.data
        cut_student(teacher, Path(student), cut, lambda: read_rows_for(data, calibration, held_out), say)
        made = distill_recipe(loaded, teacher, student, changes)

    def run() -> None:
        card = run_here(made, output, held_out=held_out, world_size=nproc, resume=resume, say=say)
        if card is not None:
            typer.echo(json.dumps(dict(card.figures)) if as_json else _figures(card.figures))

    arguments = ["distill", str(teacher), str(output), *(f"--set={one}" for one in overrides or ())]
    options: dict[str, Any] = {"student": student, "recipe": recipe, "nproc": nproc, "resume": resume, **changes}
    options |= {"held-out": held_out}
    arguments += [f"--{key}={value}" for key, value in options.items() if value is not None]
    arguments += ["--json"] if as_json else []
    raise typer.Exit(start(made, nproc, output, arguments, run, resume=resume) or 0)


def _figures(figures: Any) -> str:
    from shardlab.compress.summary import quality_lines, size_line

    return "\n".join(["teacher -> student:", *quality_lines(figures), size_line(figures)])
