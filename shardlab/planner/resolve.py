"""A recipe and the number of ranks -> the plan. Every `auto` becomes a value here, once, with its reason.

No `auto` goes further, so a backend never has a default of its own.
"""

from typing import Any

from shardlab.errors import UserError
from shardlab.plan import BackendName, Offload, Plan, Stream
from shardlab.planner.compiled import uncompilable
from shardlab.planner.names import recomputed
from shardlab.recipe import SGD, AdamW, Recipe, offload_complaint, size_bytes

LARGEST_AUTOMATIC_MICRO_BATCH = 8


def resolve(recipe: Recipe, *, world_size: int) -> Plan:
    """The plan for `world_size` ranks.

    Raises UserError where the batch does not divide over the ranks, where the recipe expects another number of ranks,
    or where the backend cannot do what the recipe asks for.
    """
    shard, train = recipe.shard, recipe.train
    if shard.world_size not in (None, world_size):
        raise UserError(
            f"shard.world_size is {shard.world_size}, but this job has {_ranks(world_size)}; "
            f"start {_ranks(shard.world_size)} or set shard.world_size={world_size}"
        )
    backend, backend_reason = _backend(recipe, world_size)
    micro_batch, micro_batch_reason = _micro_batch(recipe, world_size)
    _check_replicas(shard.replicas, backend, world_size)
    streamed = backend == "stream"
    if streamed and world_size > 1:
        raise UserError(
            f"shard.backend stream is for one rank, and this job has {world_size}: start one, or set shard.backend=fsdp"
        )
    if streamed and recipe.distill is not None and recipe.distill.cache is None:
        cache = "" if recipe.distill.hidden else "give distill.cache a directory for what it says, or "
        raise UserError(
            f"distill: backend stream holds no teacher beside the model it trains; {cache}set shard.backend=ddp"
        )
    return Plan(
        backend=backend,
        world_size=world_size,
        micro_batch=micro_batch,
        accumulation=train.global_batch_size // (micro_batch * world_size),
        global_batch_size=train.global_batch_size,
        precision=train.precision,
        recompute="full" if streamed or shard.recompute == "auto" else shard.recompute,
        # Those of stream, whose activations go to the disk, are found with the limit; the first block is one of them.
        recompute_blocks=1 if streamed and shard.offload.activations == "disk" else None,
        memory_limit=None if streamed or shard.memory_limit is None else size_bytes(shard.memory_limit),
        recompute_fits=shard.recompute == "auto" and not streamed,
        reshard_after_forward=shard.reshard_after_forward,
        shared_memory=shard.shared_memory,
        keep_freed=_keeps_freed(recipe, backend),
        replicas=shard.replicas,
        offload=_offload(recipe),
        stream=_stream(recipe, backend),
        clip_grad_norm=train.clip_grad_norm,
        compile=_compiled(recipe, backend),
        seed=train.seed,
        timeout_seconds=shard.timeout_seconds,
        reasons=(*backend_reason, *micro_batch_reason),
    )


def _keeps_freed(recipe: Recipe, backend: BackendName) -> bool:
    """Raises UserError where too much would be kept."""
    if recipe.shard.keep_freed and backend != "ddp":
        raise UserError(
            f"shard.keep_freed is for backend ddp, not {backend}, whose large buffers would stay beside each other: "
            "set shard.keep_freed=false"
        )
    return recipe.shard.keep_freed


def _compiled(recipe: Recipe, backend: BackendName) -> bool:
    """Raises UserError for what compiled blocks have no place for."""
    if not recipe.train.compile:
        return False
    complaint = uncompilable(backend, recipe.shard.recompute, recipe.shard.offload.activations)
    if complaint is not None:
        raise UserError(f"train.compile is not for shard.{complaint}; set train.compile=false")
    return True


def _offload(recipe: Recipe) -> Offload:
    given = recipe.shard.offload
    limit = None if given.disk_limit is None else size_bytes(given.disk_limit)
    return Offload(given.parameters, given.optimizer, given.activations, given.directory, limit)


def _stream(recipe: Recipe, backend: BackendName) -> Stream:
    """Raises UserError where another backend is to keep its state as only stream can."""
    shard, kept = recipe.shard, kept_as(recipe.train.optimizer)
    if backend != "stream":
        for key, value in kept.items():
            if value != "fp32":
                raise UserError(
                    f"train.optimizer.{key} {value} is for backend stream, not {backend}: set it to fp32, or "
                    "shard.backend=stream"
                )
        return Stream()
    limit = None if shard.memory_limit is None else size_bytes(shard.memory_limit)
    return Stream(limit, directory=shard.stream_directory, **kept)


def kept_as(optimizer: AdamW | SGD) -> dict[str, Any]:
    """How backend stream's files hold masters, moments and gradients."""
    return {key: getattr(optimizer, key, "fp32") for key in ("masters", "moments", "gradients")}


def describe(plan: Plan) -> str:
    """The plan in lines for people: what runs, how the batch is made up, and why each `auto` became what it is."""
    batch = f"micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x {_ranks(plan.world_size)}"
    clip = "off" if plan.clip_grad_norm is None else f"{plan.clip_grad_norm:g}"
    offloaded = [name for name in ("parameters", "optimizer") if getattr(plan.offload, name) != "none"]
    if plan.offload.activations != "none":
        offloaded.append(f"activations ({plan.offload.activations})")
    lines = [
        f"backend {plan.backend}, {plan.precision}, clip_grad_norm {clip}, recompute {recomputed(plan)}, "
        f"offload {' and '.join(offloaded) or 'none'}{', blocks compiled' if plan.compile else ''}",
        f"{batch} = {plan.global_batch_size} sequences",
        *_streaming(plan),
        *plan.reasons,
    ]
    return "\n".join(lines)


def _streaming(plan: Plan) -> list[str]:
    if plan.backend != "stream":
        return []
    limit = plan.stream.memory_limit
    within = f"within {limit / 2**30:.3g} GiB" if limit is not None else "within the machine's memory"
    return [f"training state in files in {plan.stream.directory or 'the run directory'}, {within}"]


def _backend(recipe: Recipe, world_size: int) -> tuple[BackendName, tuple[str, ...]]:
    shard = recipe.shard
    if shard.backend != "auto":
        return shard.backend, ()
    backend: BackendName = "ddp" if world_size == 1 else "fsdp"
    complaint = offload_complaint(backend, shard.offload)
    if complaint:
        raise UserError(f"shard.{complaint}, which auto is at {_ranks(world_size)}; set shard.backend=fsdp")
    why = "there is nothing to shard over" if backend == "ddp" else "it keeps the least of the model on each rank"
    return backend, (f"backend auto = {backend}: at {_ranks(world_size)} {why}",)


def _check_replicas(replicas: int, backend: BackendName, world_size: int) -> None:
    if replicas == 1:
        return
    if backend != "fsdp":
        raise UserError(f"shard.replicas {replicas} is for backend fsdp, not {backend}; set shard.replicas=1")
    if world_size % replicas:
        raise UserError(
            f"shard.replicas {replicas} does not divide {_ranks(world_size)}; set it to a divisor, such as 1"
        )


def _micro_batch(recipe: Recipe, world_size: int) -> tuple[int, tuple[str, ...]]:
    """Sequences in one forward and backward, so that micro_batch x accumulation x world_size is the global batch."""
    batch, micro_batch = recipe.train.global_batch_size, recipe.shard.micro_batch
    if micro_batch == "auto":
        _refuse_unless_multiple(batch, world_size, _ranks(world_size), "")
        share = batch // world_size
        chosen = max(size for size in range(1, LARGEST_AUTOMATIC_MICRO_BATCH + 1) if share % size == 0)
        return chosen, (
            f"micro_batch auto = {chosen}: the largest divisor up to {LARGEST_AUTOMATIC_MICRO_BATCH} of the "
            f"{share} sequences that each rank has per step",
        )
    unit = micro_batch * world_size
    other_fix = "" if batch % world_size else " or shard.micro_batch=auto"
    _refuse_unless_multiple(batch, unit, f"micro_batch {micro_batch} x {_ranks(world_size)} = {unit}", other_fix)
    return micro_batch, ()


def _refuse_unless_multiple(batch: int, unit: int, unit_in_words: str, other_fix: str) -> None:
    if batch % unit == 0:
        return
    nearest = max(unit, round(batch / unit) * unit)
    raise UserError(
        f"train.global_batch_size {batch} is not a multiple of {unit_in_words}; "
        f"set train.global_batch_size={nearest}{other_fix}"
    )


def _ranks(count: int | None) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
