"""The recipe's `distill`: a trained model that the one in training learns from."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Strict, model_validator

from shardlab.recipe.sections.base import Fraction, Section

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"]
_FROM_SHARES = ("forward_kl", "skew_kl")
_MIXTURES: dict[str, float] = {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.1}


HiddenLoss = Literal["mse", "cosine"]
Pairs = Annotated[tuple[Annotated[tuple[PositiveInt, PositiveInt], Strict(False)], ...], Strict(False)]


class HiddenSection(Section):
    """Hidden states of the student's blocks are drawn towards the teacher's; it is added to the loss."""

    layers: Annotated[Pairs, Field(min_length=1)] | None = None
    """Pairs of blocks, the student's first, from 1: [[1, 2], [2, 4]]; null is all of the student's, evenly spaced."""
    loss: HiddenLoss = "mse"
    """Of a token: the mean square of the difference, or 1 - the cosine of the angle."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of a token's distance, averaged over the pairs."""
    projection: bool | None = None
    """A linear map for each pair, trained with the student and not exported; null is where the widths differ."""


class DistillSection(Section):
    """A token's loss becomes (1 - weight) x cross-entropy + weight x divergence from the teacher."""

    teacher: str
    """A Hugging Face model directory with the tokenizer that `data` uses; it is only run forward."""
    loss: DivergenceName = "forward_kl"
    """forward_kl covers all that the teacher might say, reverse_kl keeps to what it likely says; others lie between."""
    temperature: PositiveFloat = 1.0
    """Softens both distributions; the divergence counts its square, so that its weight stays the same."""
    weight: Fraction = 0.5
    """The divergence's share of the loss: 0 is plain training, 1 the teacher alone."""
    mixture: Annotated[float, Field(gt=0, lt=1)] | None = None
    """What jsd and the skew divergences mix in; null is 0.5 for jsd and 0.1 for a skew."""

    hidden: HiddenSection | None = None
    """Learn from the teacher's hidden states as well; null is off."""

    cache: str | None = None
    """A directory for the teacher's likeliest tokens, written once; from then on no teacher is in memory."""
    cache_top_k: PositiveInt = 64
    """Tokens kept of each position; the share of all others is kept as one."""

    @model_validator(mode="after")
    def _mixture_of_what_mixes_nothing(self) -> "DistillSection":
        if self.mixture is not None and self.loss not in _MIXTURES:
            raise ValueError(f"mixture is for {', '.join(_MIXTURES)}; {self.loss} has none: set it to null")
        return self

    @model_validator(mode="after")
    def _cache_of_what_is_not_kept(self) -> "DistillSection":
        if self.cache is not None and self.loss not in _FROM_SHARES:
            raise ValueError(
                f"{self.loss} asks what the teacher says of the student's likely tokens, and a cache keeps the "
                f"teacher's: with cache the loss is {' or '.join(_FROM_SHARES)}; else set cache to null"
            )
        return self

    @model_validator(mode="after")
    def _hidden_states_of_a_cache(self) -> "DistillSection":
        if self.cache is not None and self.hidden is not None:
            raise ValueError("hidden needs the teacher's hidden states, and cache keeps its scores: set one to null")
        return self

    @property
    def mixed(self) -> float:
        """`mixture`, or its default."""
        return self.mixture if self.mixture is not None else _MIXTURES.get(self.loss, 0.5)
