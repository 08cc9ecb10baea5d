"""The recipe's `shard`: how a job is laid out over its ranks."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from shardlab.recipe.sections.base import Section


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
