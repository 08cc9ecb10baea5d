"""The recipe's `train`: the optimisation, with its kinds of optimizers and schedules."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    Tag,
    field_validator,
)

from shardlab.recipe.sections.base import BelowOne, Fraction, Names, Section


class ParameterGroup(Section):
    """Tensors that get another learning rate or weight decay. Of several groups the first that matches a name holds."""

    pattern: str
    """Glob over tensor names, as in the Hugging Face model."""
    lr: PositiveFloat | None = None
    """Peak learning rate; null is the optimizer's. To train none of them use model.freeze."""
    weight_decay: NonNegativeFloat | None = None
    """Null is the optimizer's."""


class _Optimizer(Section):
    name: str
    lr: PositiveFloat = 1e-3
    """Peak learning rate, which the schedule scales."""
    groups: Annotated[tuple[ParameterGroup, ...], Strict(False)] = ()
    """Other values for tensors by name."""


class AdamW(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[BelowOne, BelowOne], Strict(False)] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled: a step takes lr x weight_decay of each weight away."""
    masters: Literal["fp32", "bf16"] = "fp32"
    """Backend stream: how master weights lie in its files; bf16 is rounded stochastically, and halves them."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """Backend stream: 8bit is block-wise dynamic quantization, a quarter of the bytes."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Backend stream: what a step's whole gradient waits in for its update; it is added up in fp32."""


class SGD(_Optimizer):
    """Stochastic gradient descent, with momentum if asked for."""

    name: Literal["sgd"]
    momentum: BelowOne = 0.0
    """0 keeps no optimizer state."""
    weight_decay: NonNegativeFloat = 0.0
    """Added to the gradient, as torch does."""


class _Schedule(Section):
    name: str
    warmup_steps: NonNegativeInt = 20
    """Optimizer steps, whatever the ranks and the accumulation, over which the rate rises linearly to `lr`."""


class CosineSchedule(_Schedule):
    """After the warm-up half a cosine down to `final_fraction` x lr at the last step."""

    name: Literal["cosine"] = "cosine"
    final_fraction: Fraction = 0.1
    """Share of `lr` that is left at the end."""


class LinearSchedule(_Schedule):
    """After the warm-up a straight line down to `final_fraction` x lr at the last step."""

    name: Literal["linear"]
    final_fraction: Fraction = 0.0
    """Share of `lr` that is left at the end."""


class ConstantSchedule(_Schedule):
    """After the warm-up always `lr`."""

    name: Literal["constant"]


def _named(default: str) -> Discriminator:
    """Which kind of a section is meant: its `name`, which may be left out for the default kind."""

    def kind(raw: Any) -> Any:
        if isinstance(raw, Mapping):
            return raw.get("name", default)
        return getattr(raw, "name", None)

    return Discriminator(kind)


Optimizer = Annotated[Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")], _named("adamw")]
Schedule = Annotated[
    Annotated[CosineSchedule, Tag("cosine")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[ConstantSchedule, Tag("constant")],
    _named("cosine"),
]


class QATSection(Section):
    """Train with the linear layers' weights rounded as `shardlab quantize --method rtn` will round them."""

    scheme: str = "int4"
    """int2 to int8, or int4g32 with its groups."""
    group_size: PositiveInt | None = None
    """Inputs for each scale; null is 128 for int4, 32 for fewer bits, else a row."""
    local: Names = ()
    """PATTERN=SCHEME or PATTERN=none for layers by name; the last that matches holds."""
    on_indivisible: Literal["error", "skip", "smaller", "channel"] = "error"
    """Where groups don't divide a layer's inputs."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the scales."""


class TrainSection(Section):
    """The optimisation: the same numbers on every backend and at every world size."""

    steps: PositiveInt = 200
    """Optimizer steps."""
    global_batch_size: PositiveInt = 32
    """Sequences per optimizer step, over all ranks."""
    optimizer: Optimizer = AdamW()
    schedule: Schedule = CosineSchedule()
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: the forward and backward pass; master weights, moments and accumulated gradients stay fp32."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global L2 norm of the gradient; null is off, on every backend."""
    compile: bool = False
    """Compile each block by torch.compile, which takes a minute or more before the first step; not with backends zero3
    and stream, nor with selective recompute."""
    qat: QATSection | None = None
    """Round weights while training, so that rounding costs less afterwards; null is off."""
    seed: NonNegativeInt = 0
    """Weights, data order and dropout are functions of it."""
    stop_after: PositiveInt | None = None
    """End the run at that step with a checkpoint; the schedule is still that of `steps`, and --resume goes on."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does to the run; it never reaches the weights."""
    evaluate_every: PositiveInt | None = None
    """Steps between evaluations; null evaluates at the end only."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Strict(False)] = ()
    """Experiment trackers that get the recipe and every row of the metrics; their files lie in the run's tracking/."""

    @field_validator("trackers")
    @classmethod
    def _tracker_twice(cls, trackers: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name in trackers if trackers.count(name) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice")
        return trackers

    @field_validator("precision", mode="before")
    @classmethod
    def _fp16_without_loss_scaling(cls, precision: Any) -> Any:
        if precision in ("fp16", "float16", "half"):
            raise ValueError(f"{precision} is refused: it needs loss scaling, which is not here; use bf16")
        return precision
