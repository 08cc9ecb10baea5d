"""Distill: a student is trained by a recipe with a teacher in it, and what it has of the teacher is measured.

The training is `train`'s own: engine, backends, checkpoints and resume. Here are the student, which may be cut out of
the teacher first, and the card.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.compress.card import FILE, Card, lineage_of, weight_bytes
from shardlab.compress.compare import compare
from shardlab.compress.prune import PruneConfig, prune
from shardlab.compress.stage import Rows, Say, quality_figures, source_config
from shardlab.errors import UserError
from shardlab.recipe import DistillSection, Recipe
from shardlab.train.run import train

_METHODS = ("layers", "channels", "groups")


@dataclass(frozen=True)
class Cut:
    """What is left of the teacher in a student made from it; None: all."""

    layers: int | None = None
    channels: int | None = None  # of each block's MLP
    groups: int | None = None  # key and value heads, each with its query heads

    def steps(self) -> list[PruneConfig]:
        """In the order in which they are made."""
        asked = {method: getattr(self, method) for method in _METHODS}
        return [PruneConfig(method, keep=keep) for method, keep in asked.items() if keep is not None]  # type: ignore[arg-type]


def cut_student(teacher: Path, student: Path, cut: Cut, rows: Callable[[], tuple[Rows, int]], say: Say) -> None:
    """Write what `cut` leaves of `teacher` to `student`, unless that is there already, of the same teacher and cut.

    `rows()` reads (rows of text, tokens of one). Raises UserError where `student` is something else.
    """
    wanted = [(config.method, config.keep) for config in cut.steps()]
    if student.exists():
        if _made_by(student) == wanted and len(lineage_of(student)) == len(lineage_of(teacher)) + len(wanted):
            say(f"student: {student}, as it was cut before")
            return
        raise UserError(f"{student} exists and is not this cut of {teacher}: remove it, or choose another output")
    read, length = rows()
    with tempfile.TemporaryDirectory(dir=student.absolute().parent) as temporary:
        source, steps = teacher, cut.steps()
        for number, config in enumerate(steps):
            output = student if number == len(steps) - 1 else Path(temporary) / teacher.name / str(number)
            output.parent.mkdir(parents=True, exist_ok=True)
            say(f"cutting the student: {config.method}, {config.keep} stay")
            prune(source, output, config, read, length, say)
            source = output
    say(f"student: {student}")


def _made_by(directory: Path) -> list[tuple[Any, Any]]:
    stages = [stage for stage in lineage_of(directory) if stage.get("stage") == "prune"]
    return [(stage["config"].get("method"), stage["config"].get("keep")) for stage in stages if "config" in stage]


def distill_recipe(recipe: Recipe, teacher: Path, student: str | None, changes: Mapping[str, Any]) -> Recipe:
    """`recipe` with the teacher in it, its tokenizer, and the student as the model, unless that is None.

    `student` is a model directory or a config's JSON. `changes` are keys of the section `distill`. Raises UserError
    for what doesn't go together. Rows that nobody gave a length are no longer than the teacher has positions.
    """
    positions = source_config(teacher).get("max_position_embeddings")
    raw = recipe.model_dump(mode="json")
    raw["distill"] = {**(raw["distill"] or {}), **changes, "teacher": str(teacher.absolute())}
    raw["data"]["tokenizer"] = str(teacher.absolute())
    if positions is not None and "sequence_length" not in recipe.data.model_fields_set:
        raw["data"]["sequence_length"] = min(positions, recipe.data.sequence_length)
    if student is not None:
        student = str(Path(student).absolute())
        kind = "path" if Path(student).is_dir() else "config"
        raw["model"] = {**raw["model"], "preset": None, "config": None, "path": None, "builder": None, kind: student}
    made = Recipe.from_dict(raw)
    if made.model.lora is not None and not made.model.lora.merge:
        raise UserError("a distilled model is a whole one: set model.lora.merge=true")
    return made


def distill(
    recipe: Recipe,
    output: Path,
    *,
    held_out: int,
    world_size: int | None = None,
    resume: str | None = None,
    say: Say = print,
) -> Card | None:
    """Train by `recipe`, whose `distill` is set, in the run directory `output`; the card in `output`/model.

    Every rank calls this. The first one returns the card, or None where the run was stopped before its end: both
    models are then run whole by it on `held_out` rows. Raises as `train` does.
    """
    section = recipe.distill
    assert isinstance(section, DistillSection)
    summary = train(recipe, output, world_size=world_size, resume=resume, say=say)
    if summary is None or summary["model"] is None:
        return None
    teacher, model = Path(section.teacher), output / "model"
    quality = compare(teacher, model, recipe.data, rows=held_out)
    start = Path(recipe.model.path) if recipe.model.path is not None else None
    cut = start is not None and (start / FILE).is_file()
    card = Card(
        "distill",
        {
            **section.model_dump(
                mode="json", exclude={"teacher", "cache", *(() if section.cache else ("cache_top_k",))}
            ),
            "steps": summary["steps"],
            "global_batch_size": recipe.train.global_batch_size,
            "sequence_length": recipe.data.sequence_length,
            "seed": recipe.train.seed,
            "student": start.name if start is not None else (recipe.model.config or recipe.model.preset),
        },
        teacher.name,
        {
            **quality_figures(quality),
            "weight_bytes": {"before": weight_bytes(teacher), "after": weight_bytes(model)},
            "parameters": summary["parameters"],
        },
        {},
        lineage_of(start) if cut and start is not None else lineage_of(teacher),
    )
    card.write(model)
    return card


def student_name(output: Path) -> Path:
    """Where a student that was cut for the run in `output` lies: beside it, as a run's directory begins empty."""
    return output.with_name(f"{output.name}-student")
