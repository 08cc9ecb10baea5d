"""The recipe's `shard`: how a job is laid out over its ranks."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, PositiveFloat, PositiveInt, model_validator

from shardlab.recipe.sections.base import Section

_UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def size_bytes(text: object) -> int:
    """`1.5GiB` in bytes. Raises ValueError for anything else than a positive number with a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB)", str(text))
    if found is None or not float(found[1]):
        raise ValueError(f"expected a size such as 512MiB or 2GiB, got {text}")
    return round(float(found[1]) * _UNITS[found[2]])


def _size_without_a_unit(text: object) -> object:
    size_bytes(text)
    return text


Size = Annotated[str, BeforeValidator(_size_without_a_unit)]
"""As it was written; `size_bytes` says what it is."""


class OffloadSection(Section):
    """Where state lives between uses: none is the device that computes."""

    parameters: Literal["none", "cpu"] = "none"
    """With zero3 and fsdp."""
    optimizer: Literal["none", "cpu"] = "none"
    """Master weights and moments, with zero1, zero2, zero3 and fsdp."""
    activations: Literal["none", "cpu", "disk"] = "none"
    """What blocks save for their backward pass; cpu: of an accelerator's. stream: disk, instead of recompute."""
    directory: str | None = None
    """Where activations lie on the disk, in a file without a name; null is the run's own directory."""
    disk_limit: Size | None = None
    """What activations may take of the disk on each rank, such as 20GiB; null is what is free."""

    @model_validator(mode="after")
    def _what_only_the_disk_has(self) -> "OffloadSection":
        for key in ("directory", "disk_limit"):
            if self.activations != "disk" and getattr(self, key) is not None:
                raise ValueError(f"{key} is for activations: disk, not {self.activations}; leave one of them out")
        return self


class ShardSection(Section):
    """How the job is laid out over the ranks. Nothing here changes what is learned."""

    backend: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp", "stream"] = "auto"
    """ddp: whole on each rank; zero1, zero2, zero3, fsdp: sharded; stream: in files. auto: the fastest that fits."""
    micro_batch: PositiveInt | Literal["auto"] = "auto"
    """Sequences in one forward and backward; accumulation follows: global_batch_size / (micro_batch x world size)."""
    world_size: PositiveInt | None = None
    """Number of ranks expected; a job with another number is refused."""
    replicas: PositiveInt = 1
    """fsdp: groups of neighbouring ranks that each shard the whole model (HSDP); one a host keeps gathers inside it."""
    reshard_after_forward: bool = True
    """fsdp: give a block's gathered parameters back after its forward (less memory, one more gather)."""
    shared_memory: bool = True
    """fsdp: CPU ranks of one host exchange through memory that they share; false, or where that fails: gloo."""
    keep_freed: bool = False
    """ddp on a CPU with glibc: keep the memory that a step frees for the next; quicker, but more memory."""
    offload: OffloadSection = OffloadSection()
    recompute: Literal["none", "selective", "full", "auto"] = "none"
    """What runs again. selective: all but attention and every other product; full: whole blocks; auto: some, to fit."""
    memory_limit: Size | None = None
    """stream, recompute auto: what a process may take, such as 2GiB; null is the machine's memory, or its cgroup's."""
    stream_directory: str | None = None
    """stream: where the state's files lie, in a directory for each run; null is the run's own directory."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a collective may wait before the job is declared hung."""

    @model_validator(mode="after")
    def _offload_that_the_backend_cannot_do(self) -> "ShardSection":
        if self.backend != "auto":  # which backend that is shows when the number of ranks is known
            complaint = offload_complaint(self.backend, self.offload)
            if complaint:
                raise ValueError(complaint)
        return self

    @model_validator(mode="after")
    def _what_only_stream_has(self) -> "ShardSection":
        if self.backend != "stream" and self.stream_directory is not None:
            raise ValueError(f"stream_directory is for backend stream, not {self.backend}; leave one of them out")
        if self.backend != "stream" and self.memory_limit is not None and self.recompute != "auto":
            raise ValueError(
                f"memory_limit is for backend stream or recompute auto, not {self.backend} and {self.recompute}; leave "
                "one of them out"
            )
        return self


OFFLOADING: dict[str, tuple[str, ...]] = {
    "parameters": ("zero3", "fsdp"),
    "optimizer": ("zero1", "zero2", "zero3", "fsdp"),
}


def offload_complaint(backend: str, offload: OffloadSection) -> str | None:
    """Why `backend` cannot carry `offload` out, or None."""
    if offload.activations == "cpu" and backend == "stream":
        return "offload.activations: stream keeps them in memory or on the disk; set it to disk, or to none"
    for what, able in OFFLOADING.items():
        if getattr(offload, what) != "none" and backend not in able:
            others = " or ".join([", ".join(able[:-1]), able[-1]])
            return f"offload.{what}=cpu needs backend {others}, not {backend}"
    return None
