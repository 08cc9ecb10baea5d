"""The plan: where training state lives and how a step runs. Pure data; `planner` makes it, `backends` carry it out."""

from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
Precision = Literal["fp32", "bf16"]
Place = Literal["none", "cpu"]


@dataclass(frozen=True)
class Offload:
    """Where parameters and optimizer state (masters and moments) live between uses: "none" = on the device."""

    parameters: Place = "none"
    optimizer: Place = "none"


@dataclass(frozen=True)
class Plan:
    """Every value is resolved: nothing here is "auto".

    `micro_batch` and `global_batch_size` are sequences; `micro_batch * accumulation * world_size == global_batch_size`.
    """

    backend: BackendName
    world_size: int
    micro_batch: int
    accumulation: int
    global_batch_size: int
    precision: Precision
    recompute: Literal["none", "full"] = "none"
    reshard_after_forward: bool = True
    replicas: int = 1  # fsdp: groups of ranks that hold the model whole between them (HSDP)
    offload: Offload = field(default_factory=Offload)
    clip_grad_norm: float | None = 1.0
    seed: int = 0
    timeout_seconds: float = 600.0
    reasons: tuple[str, ...] = ()  # one line for each value that was "auto": what it became and why
