"""What `hold_teacher` and a teacher's forward pass allocate, on the backends that hold one.

Its activations are in the student's trace: they are there before the student's own forward pass begins, but for its
last hidden states. Here are its weights: whole in the type that computes, or a rank's part of them, and then what is
gathered while it runs and while its head makes scores.
"""

from dataclasses import replace

from shardlab.backends.placement import FP32, Setting, added, largest, shares_memory
from shardlab.backends.zero_config import PERSISTENCE_THRESHOLD, bucket_elements
from shardlab.plan import ROOT, Kind, ModelShape, Moment, Span, Timeline


def with_teacher(setting: Setting, moments: list[Moment]) -> list[Moment]:
    """A step's moments, the teacher's weights beside each, or what it said."""
    held: dict[Kind, int] = resident(setting) if not setting.taught else {"activations": setting.taught}
    return [replace(one, bytes=added(one.bytes, held)) for one in moments] if held else moments


def timeline(setting: Setting) -> Timeline:
    """The setting's, with what is gathered of a sharded teacher where it runs, and where its head does."""
    if setting.teacher is None or not _sharded(setting):
        return setting.timeline
    running, scoring = _gathered(setting, setting.teacher)

    def gathered(span: Span) -> Span:
        if span.phase == "forward" and span.segment in (ROOT, setting.model.tail):
            size = running if span.segment == ROOT else scoring
            return replace(span, peak=added(span.peak, {"communication": size}))
        return span

    return tuple(gathered(span) for span in setting.timeline)


def resident(setting: Setting) -> dict[Kind, int]:
    """Bytes that stay on a rank for a teacher, by kind; nothing without one."""
    if setting.teacher is None:
        return {}
    size, teacher = setting.compute_size, setting.teacher
    if not _sharded(setting):
        return {"parameters": teacher.numel() * size}
    held: dict[Kind, int] = {"parameters": sum(_share(setting, p.shape) for p in teacher.parameters) * size}
    if setting.plan.backend == "zero3":
        held["communication"] = sum(p.numel for p in teacher.parameters if p.numel < PERSISTENCE_THRESHOLD) * size
    elif shares_memory(setting):
        held["communication"] = max(_units(teacher)) * size
    return held


def mapped(setting: Setting) -> int:
    """Bytes of a teacher on a CPU that may stay in the file they are read from, and are then no memory of the process.

    So it is where the file's type is the one that computes, and nothing is sharded.
    """
    return 0 if setting.teacher is None or _sharded(setting) else setting.teacher.numel() * setting.compute_size


def building(setting: Setting) -> int:
    """Bytes at the highest point of `hold_teacher`, above what stands: a unit is whole, then its part is copied."""
    if setting.teacher is None:
        return 0
    held = sum(resident(setting).values())
    passing = largest(setting.teacher.parameters) * FP32  # a tensor as it is read, before it is cast
    return held + passing + (max(_units(setting.teacher)) * setting.compute_size if _sharded(setting) else 0)


def _sharded(setting: Setting) -> bool:
    return setting.plan.backend in ("fsdp", "zero3") and setting.plan.world_size > 1


def _share(setting: Setting, shape: tuple[int, ...]) -> int:
    """Elements of a tensor on one rank: rows are shared out, the last share padded."""
    ranks = setting.plan.world_size // setting.plan.replicas
    numel = 1
    for length in shape:
        numel *= length
    if setting.plan.backend == "zero3" or not shape:
        return -(-numel // ranks)
    return -(-shape[0] // ranks) * (numel // max(1, shape[0]))


def _units(teacher: ModelShape) -> list[int]:
    """Elements of each unit, the root's first."""
    return [sum(p.numel for p in teacher.unit(number)) for number in range(teacher.embedding + 1)]


def _gathered(setting: Setting, teacher: ModelShape) -> tuple[int, int]:
    """Bytes gathered at most while the teacher runs, and while its head does."""
    root, *units = _units(teacher)
    size, head = setting.compute_size, units[teacher.tail - 1] if units[teacher.tail - 1] else root
    if setting.plan.backend == "zero3":
        ahead = bucket_elements(teacher.numel())
        return (min(max(root, *units), largest(teacher.parameters) + ahead) + ahead) * size, head * size
    flat = 0 if shares_memory(setting) else 1  # the buffer that a unit is gathered in, before it is copied out
    return (root + max(units) * (1 + flat)) * size, head * (1 + flat) * size
