"""The recipe's keys, their defaults, and the contradictions that are refused.

Values are strict: `"8"` is not 8, and a typo is not a default. Sections are frozen: a recipe that was validated stays
valid. Each validator below is named after the user's failure that it prevents. A key whose feature does not exist yet
is not here, so asking for it is an error and never a wish passed over in silence.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from shardlab.errors import UserError
from shardlab.recipe.complaints import explain

Names = Annotated[tuple[str, ...], Strict(False)]  # a YAML list; a tuple here, so that it is frozen too
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TOKENIZER_NAMES = re.compile(r"bytes|bpe-[1-9]\d*k")


class Section(BaseModel):
    """Unknown keys, numeric strings and non-finite numbers are refused, and nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class LoraSection(Section):
    """Low-rank adapters on linear layers; everything else is frozen."""

    rank: PositiveInt = 8
    """Rows of the low-rank factors."""
    alpha: PositiveFloat = 16.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: BelowOne = 0.0
    """On the adapters' input."""
    targets: Literal["all-linear"] | Names = "all-linear"
    """Names of the layers, or their ends, such as q_proj; all-linear is every linear layer but the head."""
    merge: bool = False
    """Save the model with the adapters merged in, instead of an adapter directory."""


class ModelSection(Section):
    """The model to train: exactly one of `preset`, `config`, `path` and `builder`."""

    preset: Literal["tiny", "6m", "150m"] | None = None
    """A Llama-like model of that size; 6m when no other source is given."""
    config: str | None = None
    """A Hugging Face config JSON: the architecture, with fresh weights."""
    path: str | None = None
    """A Hugging Face model directory: the architecture and its weights."""
    builder: str | None = None
    """"package.module:function", called without arguments, returns the model."""
    freeze: Names = ()
    """Glob patterns of tensor names, as in the Hugging Face model, that are not trained."""
    lora: LoraSection | None = None
    """Train low-rank adapters on a model directory (`path`) instead of its weights; null is off."""

    @model_validator(mode="before")
    @classmethod
    def _default_source(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and all(raw.get(key) is None for key in _MODEL_SOURCES):
            return {**raw, "preset": "6m"}
        return raw

    @model_validator(mode="after")
    def _two_models_at_once(self) -> "ModelSection":
        given = [key for key in _MODEL_SOURCES if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; keep one and set the other to null")
        return self

    @model_validator(mode="after")
    def _adapters_on_random_weights(self) -> "ModelSection":
        if self.lora is not None and self.path is None:
            raise ValueError("lora needs path, a trained model to adapt; fresh weights are trained whole")
        return self

    @field_validator("builder")
    @classmethod
    def _builder_that_names_no_function(cls, builder: str | None) -> str | None:
        if builder is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", builder):
            raise ValueError(f'expected "package.module:function", got "{builder}"')
        return builder


_MODEL_SOURCES = ("preset", "config", "path", "builder")


class ColumnNames(Section):
    """Where a record of JSONL, Parquet or a dataset has what `data.format` needs."""

    text: str = "text"
    """With format text."""
    prompt: str = "prompt"
    """With format instruct: what is given."""
    completion: str = "completion"
    """With format instruct: what is learned."""
    messages: str = "messages"
    """With format chat: a list of {role, content}."""


class DataSection(Section):
    """The text to train on, and how it becomes sequences of tokens."""

    source: Literal["stdlib"] | None = None
    """stdlib: the source text of Python's standard library; the default when no files are given."""
    files: Names = ()
    """Files or globs, used instead of a source: text, .jsonl, .parquet, or the directory of a saved dataset."""
    builder: str | None = None
    """"package.module:function" returns (training rows, evaluation rows), for a model that is no language model."""
    evaluation_files: Names = ()
    """Files or globs held out for evaluation, used instead of `evaluation_fraction`."""
    format: Literal["text", "instruct", "chat"] = "text"
    """text: every token is learned. instruct: completions are. chat: what the assistant says is."""
    columns: ColumnNames = ColumnNames()
    on_bad_record: Literal["error", "skip", "replace"] = "error"
    """What is done about records that are empty, not UTF-8, cut off and so on. replace: mend what can be mended."""
    max_record_bytes: PositiveInt = 1_000_000
    """A longer line of JSONL or text in a row is a bad record; text files may have any length."""
    tokenizer: str = "bpe-8k"
    """bytes, bpe-<N>k (trained on the corpus, N thousand entries, cached), or a Hugging Face tokenizer directory."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence."""
    packing: bool = True
    """Several documents in a row; false: one document in a row, truncated or padded."""
    streaming: bool = False
    """Tokenise while training, and keep no tokens on disk."""
    evaluation_fraction: BelowOne = 0.02
    """Share of the corpus held out for evaluation."""
    cache_dir: str | None = None
    """Where tokenised text is kept; null is the user's cache directory."""

    @model_validator(mode="before")
    @classmethod
    def _default_source(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and not raw.get("files") and not raw.get("builder") and raw.get("source") is None:
            return {**raw, "source": "stdlib"}
        return raw

    @model_validator(mode="after")
    def _two_corpora_at_once(self) -> "DataSection":
        if self.builder is not None and (self.source is not None or self.files):
            raise ValueError("builder brings rows of its own; leave source and files out")
        if self.source is not None and self.files:
            raise ValueError("source and files are both given; keep one (source: null trains on the files)")
        return self

    @model_validator(mode="after")
    def _prompts_in_plain_text(self) -> "DataSection":
        if self.source is not None and self.format != "text":
            raise ValueError(f"format {self.format} needs files of records (.jsonl, .parquet, a dataset), not a source")
        return self

    @model_validator(mode="after")
    def _fraction_of_a_stream(self) -> "DataSection":
        if self.streaming and self.evaluation_fraction and not self.evaluation_files:
            raise ValueError(
                "streaming can't hold out a fraction of what it has not read; give evaluation_files, or set "
                "evaluation_fraction to 0"
            )
        return self

    @field_validator("tokenizer")
    @classmethod
    def _misspelled_vocabulary_size(cls, tokenizer: str) -> str:
        if not tokenizer:
            raise ValueError("expected bytes, bpe-<N>k such as bpe-8k, or a directory, got nothing")
        if tokenizer.startswith("bpe") and not TOKENIZER_NAMES.fullmatch(tokenizer):
            raise ValueError(f'expected bpe-<N>k such as bpe-8k, got "{tokenizer}"')
        return tokenizer


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


class OffloadSection(Section):
    """Where state lives between uses: none is the device that computes."""

    parameters: Literal["none", "cpu"] = "none"
    """With zero3 and fsdp."""
    optimizer: Literal["none", "cpu"] = "none"
    """Master weights and moments, with zero1, zero2, zero3 and fsdp."""


class ShardSection(Section):
    """How the job is laid out over the ranks. Nothing here changes what is learned."""

    backend: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp"] = "auto"
    """ddp: the model whole on each rank; zero1, zero2, zero3, fsdp: sharded. auto: ddp on one rank, else fsdp."""
    micro_batch: PositiveInt | Literal["auto"] = "auto"
    """Sequences in one forward and backward; accumulation follows: global_batch_size / (micro_batch x world size)."""
    world_size: PositiveInt | None = None
    """Number of ranks expected; a job with another number is refused."""
    replicas: PositiveInt = 1
    """fsdp: groups of neighbouring ranks that each shard the whole model (HSDP); one a host keeps gathers inside it."""
    reshard_after_forward: bool = True
    """fsdp: give a block's gathered parameters back after its forward (less memory, one more gather)."""
    offload: OffloadSection = OffloadSection()
    recompute: Literal["none", "full"] = "none"
    """full: keep only the blocks' borders and run each block again in the backward pass."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a collective may wait before the job is declared hung."""

    @model_validator(mode="after")
    def _offload_that_the_backend_cannot_do(self) -> "ShardSection":
        if self.backend != "auto":  # which backend that is shows when the number of ranks is known
            complaint = offload_complaint(self.backend, self.offload)
            if complaint:
                raise ValueError(complaint)
        return self


OFFLOADING: dict[str, tuple[str, ...]] = {
    "parameters": ("zero3", "fsdp"),
    "optimizer": ("zero1", "zero2", "zero3", "fsdp"),
}


def offload_complaint(backend: str, offload: OffloadSection) -> str | None:
    """Why `backend` cannot carry `offload` out, or None."""
    for what, able in OFFLOADING.items():
        if getattr(offload, what) != "none" and backend not in able:
            others = " or ".join([", ".join(able[:-1]), able[-1]])
            return f"offload.{what}=cpu needs backend {others}, not {backend}"
    return None


class CheckpointSection(Section):
    """Training state on disk, to go on from on any backend at any number of ranks."""

    every: PositiveInt | None = 100
    """Steps between checkpoints; null saves only when the run is stopped."""
    keep: PositiveInt = 2
    """The newest so many are kept, and the best by evaluation besides."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory."""
    grace_seconds: PositiveFloat = 300.0
    """After a signal to the launcher, how long the ranks may take to save before they are ended."""
    on_failure: Literal["stop", "continue"] = "stop"
    """A save that fails, on a full disk say, ends the run; or it goes on, and fails at its end."""


class Recipe(Section):
    """What to do, whole. Every key may be left out."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    shard: ShardSection = ShardSection()
    checkpoint: CheckpointSection = CheckpointSection()

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
