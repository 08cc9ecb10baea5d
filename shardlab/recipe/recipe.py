"""The whole recipe: its sections, from a mapping such as YAML gives."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError, model_validator

from shardlab.errors import UserError
from shardlab.recipe.complaints import explain
from shardlab.recipe.sections import (
    CheckpointSection,
    DataSection,
    DistillSection,
    ModelSection,
    ShardSection,
    TrainSection,
)
from shardlab.recipe.sections.base import Section


class Recipe(Section):
    """What to do, whole. Every key may be left out."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    distill: DistillSection | None = None
    """Learn from a teacher too; null is off."""
    shard: ShardSection = ShardSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def _rounding_weights_that_are_frozen(self) -> "Recipe":
        if self.train.qat is not None and self.model.lora is not None:
            raise ValueError("train.qat rounds the weights that are trained; model.lora freezes them: leave one out")
        return self

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "recipe") -> "Recipe":
        """The recipe in a mapping such as YAML gives; paths are taken as they are.

        An empty section (null) is one left out. Raises UserError, opening with `where`, for what is not a recipe.
        """
        given = {key: value for key, value in raw.items() if value is not None or key not in cls.model_fields}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UserError(f"{where}: {explain(error, cls).text}") from error
