"""What a run takes around its steps: to make or read the model, to save its state, and to write the model at the end.

Each backend's `standing` says what it holds outside of a step; here is what the recipe adds to that. Memory is of the
rank that takes most, which is the first one where something is written once.
"""

import math
from dataclasses import dataclass, replace

from shardlab.backends import ddp_footprint, fsdp_footprint, teacher_footprint, zero_footprint
from shardlab.backends.placement import FP32, Setting, Standing, added, largest, masks, pinned, stored
from shardlab.plan import Around, Phase
from shardlab.recipe import Recipe

SHARD_BYTES = 1024**3  # of the model in one file at the end: what the writing rank collects, beside one tensor


@dataclass(frozen=True)
class Saving:
    """What of a recipe decides about memory and disk around the steps.

    `copies`: whether a save in the background is made at all, and `during`: whether steps follow the first one.
    `checkpoints`: how many are on the disk at once, at most. `whole_model`: else the adapters alone are written.
    """

    copies: bool
    during: bool
    checkpoints: int
    whole_model: bool

    @classmethod
    def of(cls, recipe: Recipe) -> "Saving":
        """As `shardlab train` goes by it."""
        section, last, lora = recipe.checkpoint, last_step(recipe), recipe.model.lora
        saves = section.every is not None and section.every <= last
        return cls(
            copies=saves and section.asynchronous,
            during=saves and section.every is not None and section.every < last,
            checkpoints=most_checkpoints(recipe),
            whole_model=lora is None or lora.merge,
        )


def last_step(recipe: Recipe) -> int:
    """Where the run ends."""
    train = recipe.train
    return min(train.steps, train.stop_after or train.steps)


def most_checkpoints(recipe: Recipe) -> int:
    """How many lie on the disk at once: the newer one is whole before an older one goes."""
    section, last = recipe.checkpoint, last_step(recipe)
    if section.every is None or section.every > last:
        return 0
    kept = section.keep + (recipe.train.evaluate_every is not None)
    return min(math.ceil(last / section.every), kept + 1)


def standing(setting: Setting) -> Standing | None:
    """What the plan's backend says of itself; None for stream, whose parts are all bounded by its limit."""
    name = setting.plan.backend
    if name == "stream":
        return None
    part = {"ddp": ddp_footprint, "fsdp": fsdp_footprint}.get(name, zero_footprint)
    found: Standing = part.standing(setting)
    if setting.masked:
        held, host = masks(setting)
        # A tensor that is read is copied before its pruned weights are set to zero.
        building = found.building + sum(held.values()) + largest(setting.model.parameters) * FP32
        resident, away = added(found.resident, held), added(found.host, host)
        found = replace(found, resident=resident, host=away, building=building)
    teacher = teacher_footprint.resident(setting)
    if not teacher:
        return found
    # The teacher comes when the student's weights are in place.
    stands = sum(size for kind, size in found.resident.items() if kind != "moments")
    building = max(found.building, stands + teacher_footprint.building(setting))
    return replace(found, resident=added(found.resident, teacher), building=building)


def snapshot_bytes(setting: Setting, found: Standing) -> int:
    """Of the copy that a save in the background writes from. For an accelerator it is pinned, tensor by tensor."""
    shares = 1 if setting.plan.backend == "ddp" else setting.plan.world_size // setting.plan.replicas
    sizes = [-(-p.numel // shares) * FP32 for p in setting.model.parameters if p.trainable]
    if not setting.accelerator or not sizes:
        return found.saved
    return round(found.saved * sum(map(pinned, sizes)) / sum(sizes))


def on_disk(setting: Setting, saving: Saving) -> tuple[int, int]:
    """Bytes of one checkpoint and of the model at the end, over all ranks. Needs no timeline."""
    size = setting.compute_size
    frozen = FP32 if setting.plan.backend in ("fsdp", "stream") else size
    elements = setting.model.numel(trainable=None if saving.whole_model else True)
    return stored(setting, frozen) + setting.masked, elements * size + setting.masked


def around(setting: Setting, saving: Saving, beside: int, spread: float, kept: int = 0) -> Around:
    """`beside`: what the process has beside its tensors, and `kept`: what it may have kept of the steps.

    `spread`: the share by which a figure may be off.
    """
    found, (checkpoint, model) = standing(setting), on_disk(setting, saving)
    if found is None:
        return Around(Phase(0, 0), Phase(0, 0), 0, checkpoint, saving.checkpoints, model)
    snapshot = snapshot_bytes(setting, found) if saving.copies else 0
    biggest = largest(setting.model.parameters)
    stands, away = sum(found.resident.values()) + found.passing, sum(found.host.values())
    # Files are collected on the host, tensor by tensor; there a tensor is also made, or read, before it goes elsewhere.
    collected = min(model, SHARD_BYTES + biggest * setting.compute_size) if found.copied else 0
    if setting.accelerator:
        building = _phase(found.building, beside, spread, away + biggest * FP32)
        writing = _phase(stands, beside, spread, away + collected + snapshot)
    else:
        building = _phase(found.building, beside, spread)
        writing = _phase(stands + collected + snapshot, beside, spread)
        writing = replace(writing, high=writing.high + kept)
    return Around(building, writing, snapshot, checkpoint, saving.checkpoints, model)


def _phase(tensors: int, beside: int, spread: float, host: int = 0) -> Phase:
    off = round(spread * tensors)
    return Phase(max(0, tensors - off), tensors + beside + off, host)
