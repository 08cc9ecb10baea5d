"""The recipe's keys, their defaults, and the contradictions that are refused: a module for each section.

Values are strict: `"8"` is not 8, and a typo is not a default. Sections are frozen: a recipe that was validated stays
valid. Each validator is named after the user's failure that it prevents. A key whose feature does not exist yet is not
here, so asking for it is an error and never a wish passed over in silence.
"""

from shardlab.recipe.sections.checkpoint import CheckpointSection
from shardlab.recipe.sections.data import TOKENIZER_NAMES, ColumnNames, DataSection
from shardlab.recipe.sections.distill import DistillSection, DivergenceName, HiddenSection
from shardlab.recipe.sections.model import LoraSection, ModelSection
from shardlab.recipe.sections.shard import OffloadSection, ShardSection, offload_complaint, size_bytes
from shardlab.recipe.sections.train import (
    SGD,
    AdamW,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ParameterGroup,
    QATSection,
    TrainSection,
)

__all__ = [
    "SGD",
    "TOKENIZER_NAMES",
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
    "ShardSection",
    "TrainSection",
    "offload_complaint",
    "size_bytes",
]
