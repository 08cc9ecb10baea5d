"""The recipe: what to do, as one typed YAML file in which every key may be left out.

`sections` holds the keys, their defaults and the contradictions refused, `recipe` the whole of them; `reading` turns a
file and `--set` overrides into a `Recipe` and back; `complaints` words what a user has to mend. Importing this package
imports no heavy library.
"""

from shardlab.recipe.reading import dump_recipe, load_recipe, recipe_schema
from shardlab.recipe.recipe import Recipe
from shardlab.recipe.sections import (
    SGD,
    AdamW,
    CheckpointSection,
    ColumnNames,
    ConstantSchedule,
    CosineSchedule,
    DataSection,
    DistillSection,
    DivergenceName,
    HiddenSection,
    LinearSchedule,
    LoraSection,
    ModelSection,
    OffloadSection,
    ParameterGroup,
    QATSection,
    ShardSection,
    TrainSection,
    offload_complaint,
    size_bytes,
)

__all__ = [
    "SGD",
    "AdamW",
    "CheckpointSection",
    "ColumnNames",
    "ConstantSchedule",
    "CosineSchedule",
    "DataSection",
    "DistillSection",
    "DivergenceName",
    "HiddenSection",
    "LinearSchedule",
    "LoraSection",
    "ModelSection",
    "OffloadSection",
    "ParameterGroup",
    "QATSection",
    "Recipe",
    "ShardSection",
    "TrainSection",
    "dump_recipe",
    "load_recipe",
    "offload_complaint",
    "recipe_schema",
    "size_bytes",
]
