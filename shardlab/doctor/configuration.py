"""What a configuration file has a job compute, as far as the file says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardlab.plan import BackendName, Precision, Recompute

Kind = Literal["plan", "ds_config"]


SCRIPTS_OWN = "the script's"


class Setting(NamedTuple):
    """A value, and where it comes from."""

    value: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})" if self.origin else self.value


def optimizer_in_words(name: str, values: Mapping[str, Any]) -> str:
    """An optimizer's name and numbers, alike for a recipe and a ds_config."""
    numbers = {key: values[key] for key in ("lr", "betas", "eps", "momentum", "weight_decay") if key in values}
    listed = {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in numbers.items()}
    return " ".join([name, *(f"{key} {value}" for key, value in listed.items())])


@dataclass(frozen=True)
class Configuration:
    """One side of a comparison. None: the file does not say, and the other side's value is taken.

    A `plan` runs on our backends; a `ds_config` in DeepSpeed itself, with that config. `settings` are what may make
    one job compute something else than another.
    """

    file: str
    kind: Kind
    precision: Precision
    backend: BackendName = "ddp"
    clip_grad_norm: float | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch_size: int | None = None
    offload_parameters: bool = False
    offload_optimizer: bool = False
    recompute: Recompute = "none"
    reshard_after_forward: bool = True
    seed: int = 0
    ds_config: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None  # a recipe's train.optimizer
    schedule: dict[str, Any] | None = None  # a recipe's train.schedule
    steps: int = 1000  # of the schedule
    own_optimizer: bool = False  # a ds_config with an optimizer in it
    own_schedule: bool = False  # a ds_config with a scheduler in it
    settings: dict[str, Setting] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what is not run as the file says, and why that makes no difference
    model: dict[str, Any] | None = None  # the config.json of its model, if it names one
