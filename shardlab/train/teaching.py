"""The teacher that a recipe asks for: held beside the student, or what it said once, kept in a cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from shardlab.data import OwnData, PreparedData
from shardlab.data.teacher_cache import TeacherCache
from shardlab.data.tokenizer import refuse_other_tokens, tokenizer_directory
from shardlab.errors import UserError
from shardlab.model.build import build_teacher
from shardlab.model.cached_teacher import CachedTeacher
from shardlab.model.deferred import Weights
from shardlab.model.shape import teacher_shape
from shardlab.model.teacher import Distillation
from shardlab.plan import ModelShape
from shardlab.train.teacher_cache import Fillers, fill, open_cache

if TYPE_CHECKING:
    from shardlab.train.engine import Engine


@dataclass(frozen=True)
class Teaching:
    """A recipe's teacher, with no weight in memory yet."""

    distillation: Distillation
    weights: Weights
    cache: TeacherCache | None

    def describe(self) -> str:
        """For people."""
        return self.distillation.describe(None if self.cache is None else self.cache.identity.top_k)

    @property
    def held(self) -> ModelShape | None:
        """What is held in the run, if it is."""
        return teacher_shape(self.distillation.teacher) if self.cache is None else None

    def prepare(
        self, engine: "Engine", data: PreparedData | OwnData, say: Callable[[str], None]
    ) -> tuple[PreparedData | OwnData, tuple[Distillation, Weights] | CachedTeacher]:
        """Fill the cache, if there is one: the data with what it says, and what `Engine.setup` is to be given."""
        if self.cache is None or isinstance(data, OwnData):
            return data, (self.distillation, self.weights)
        on = Fillers(engine.ranks, engine.topology, engine.plan.precision, say)
        fill(engine.recipe, self.cache, data, engine.plan.micro_batch, on)
        return replace(data, teacher=self.cache), CachedTeacher(self.distillation, self.cache.identity.top_k)


def teaching(engine: "Engine", data: PreparedData | OwnData, student: nn.Module) -> Teaching | None:
    """The recipe's teacher of `student`. Collective. Raises UserError where it reads a text otherwise.

    So it does for a cache of something else.
    """
    section = engine.recipe.distill
    if section is None:
        return None
    if isinstance(data, OwnData):
        raise UserError("distill is for language models, and data.builder's rows have no tokenizer")
    theirs = tokenizer_directory(section.teacher, "distill.teacher")
    refuse_other_tokens(theirs, data.tokenizer, section.teacher, "data.tokenizer")
    length, vocabulary = engine.recipe.data.sequence_length, len(data.tokenizer)
    distillation, weights = build_teacher(section, student, vocabulary=vocabulary, sequence_length=length)
    cache = None
    if section.cache is not None:
        cache = open_cache(engine.recipe, data, distillation.columns, engine.ranks)
    return Teaching(distillation, weights, cache)
