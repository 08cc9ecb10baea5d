"""A survey for people, and for scripts."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from shardlab.plan import KINDS
from shardlab.planner.explain import choice, reasons
from shardlab.planner.names import gib, name, over, recomputed, settings
from shardlab.planner.search import Candidate, Survey, nearest

_HEADS = {
    "parameters": "weights",
    "gradients": "grads",
    "masters": "masters",
    "moments": "moments",
    "activations": "activ.",
    "head": "head",
    "logits": "logits",
    "communication": "comm.",
    "temporaries": "temp.",
    "snapshot": "saving",
    "libraries": "libs",
}


def text(found: Survey, *, every: bool = False, explain: bool = False) -> str:
    """Model and machine, the table, the choice and the rule behind it; `explain`: why each other was not chosen."""
    machine = found.machine
    nodes = f"{machine.nodes} nodes, " if machine.nodes > 1 else ""
    lines = [
        f"{found.parameters / 1e6:,.1f}M parameters, {found.trainable / 1e6:,.1f}M of them trained; "
        f"{machine.ranks} x {gib(machine.memory_bytes)} GiB ({nodes}{machine.name})",
        "predicted peak of a rank in GiB, low to high, and by kind at a step's highest moment; what does not fit is"
        " over by the figure in the last column",
        *_speed(found),
        "",
        *_table([*(found.candidates if every else _shortest(found.candidates)), *_streamed(found)], found),
        "",
        *(f"stream: {line}" for one in _streamed(found) for line in _disk(one, found)),
        *_around(found),
    ]
    if found.own is not None:
        lines.append(f"the recipe's own plan, {name(found.own.plan)}: {_verdict(found.own)}")
        lines.append(f"  its peak is in the {found.own.footprint.where}")
        lines += _saved_away(found.own)
    best = found.best
    if best is None:
        closest = nearest(found.candidates)
        lines.append(f"nothing fits; the nearest is {name(closest.plan)}, {_verdict(closest)}")
        lines += [f"what does, from the disk: {settings(one.plan)}" for one in _streamed(found)]
    elif found.timed:
        lines += [f"fastest that fits: {choice(found)}", f"  {settings(best.plan)}"]
    else:
        lines.append(f"best that fits: {name(best.plan)} ({settings(best.plan)})")
    lines.append(f"rule: {found.rule}")
    if explain:
        lines += ["", *(f"{name(c.plan)}: {why}" for c, why in reasons(found))]
    return "\n".join(lines)


def _saved_away(candidate: Candidate) -> list[str]:
    """Of a plan whose blocks save to the disk."""
    disk = candidate.footprint.disk
    if candidate.plan.offload.activations != "disk" or candidate.plan.backend == "stream" or disk is None:
        return []
    return [
        f"  its activations take {gib(disk.bytes)} GiB of the disk for each rank; a step writes and reads "
        f"{gib(disk.written)} GiB of them"
    ]


def _streamed(found: Survey) -> list[Candidate]:
    return [found.stream] if found.stream is not None else []


def _disk(candidate: Candidate, found: Survey) -> list[str]:
    """What a plan that keeps its state in files has there, and moves, and how long a disk bears it."""
    disk, plan, cost = candidate.footprint.disk, candidate.plan, candidate.cost
    assert disk is not None
    sequences = plan.global_batch_size
    kept = "all of" if plan.stream.activation_bytes is None else f"{gib(plan.stream.activation_bytes)} GiB of"
    lines = [
        f"{gib(disk.bytes)} GiB on the disk; a step of {sequences} sequences reads {gib(disk.read)} GiB and writes "
        f"{gib(disk.written)}, so larger steps move less for each token; {kept} the blocks' inputs in memory",
        f"{_written_per_token(candidate, found) / 1e6:,.3g} MB written for each token",
    ]
    if cost is not None and cost.unhindered is not None and cost.unhindered > sequences:
        lines[-1] += (
            f"; the disk holds up {cost.parts['disk'] / cost.seconds:.0%} of a step: from "
            f"train.global_batch_size={cost.unhindered} on it would not"
        )
    days = _days(candidate, found)
    if days is not None:
        lines.append(f"a disk rated for {found.machine.disk_tbw:,g} TB written bears {days:,.3g} days of training")
    return lines


def _wear(candidate: Candidate, found: Survey) -> dict[str, Any]:
    return {"written_bytes_per_token": _written_per_token(candidate, found), "disk_days": _days(candidate, found)}


def _written_per_token(candidate: Candidate, found: Survey) -> float:
    """Bytes."""
    assert candidate.footprint.disk is not None
    tokens = candidate.plan.global_batch_size * found.recipe.data.sequence_length
    return candidate.footprint.disk.written / tokens


def _days(candidate: Candidate, found: Survey) -> float | None:
    """Until the disk has taken what it is rated for; None where the rating or the time of a step is not known."""
    disk, cost, rating = candidate.footprint.disk, candidate.cost, found.machine.disk_tbw
    if disk is None or cost is None or rating is None:
        return None
    return rating * 1e12 / disk.written * cost.seconds / 86400


def _around(found: Survey) -> list[str]:
    """Of the recipe's own plan, or the best: what it takes beside its steps, and on the disk."""
    shown = found.own or found.best
    around = shown.footprint.around if shown is not None else None
    if shown is None or around is None:
        return []
    host = [f"{gib(around.snapshot)} GiB of host memory for the copy that saves are written from"]
    phases = [
        f"{what} {gib(phase.high + shown.footprint.libraries)}"
        + (f" and {gib(phase.host)} on the host" * bool(phase.host))
        for what, phase in (("building the model", around.building), ("writing it at the end", around.writing))
        if phase.high
    ]
    disk = [f"{around.checkpoints} checkpoints of {gib(around.checkpoint)} GiB at once"] if around.checkpoints else []
    disk += [f"the model of {gib(around.model)}"]
    parts = [*([f"at most {', '.join(phases)} GiB"] if phases else []), *(host if around.snapshot else [])]
    parts += [f"on the disk {' and '.join(disk)}"]
    return [f"around the steps of {name(shown.plan)}: {'; '.join(parts)}"]


def _speed(found: Survey) -> list[str]:
    """What the predictions of time rest on."""
    rates = found.machine.rates
    if rates is None or not found.timed:
        return []
    lines = [
        f"time by {rates.source}; right within {rates.error:.0%}; "
        "* = no other that fits takes less memory and less time"
    ]
    if found.recipe.train.compile:
        lines.append(
            "train.compile: the time is that of blocks as they are; compiling them comes before the first step"
        )
    return lines


def as_dict(found: Survey) -> dict[str, Any]:
    """Everything, for `--json`."""
    front, why = found.front, {id(c): reason for c, reason in reasons(found)}
    return {
        "machine": dataclasses.asdict(found.machine),
        "parameters": found.parameters,
        "trainable": found.trainable,
        "recipe": candidate_dict(found.own) if found.own is not None else None,
        "candidates": [
            candidate_dict(c) | {"on_front": c in front, "why_not": why.get(id(c))} for c in found.candidates
        ],
        "stream": candidate_dict(found.stream) | _wear(found.stream, found) if found.stream is not None else None,
        "best": candidate_dict(found.best) if found.best is not None else None,
        "rule": found.rule,
    }


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """One of them."""
    plan = candidate.plan
    return {
        "backend": plan.backend,
        "offload": dataclasses.asdict(plan.offload),
        "recompute": plan.recompute,
        "recompute_blocks": plan.recompute_blocks,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "world_size": plan.world_size,
        "footprint": dataclasses.asdict(candidate.footprint),
        "fits": candidate.fits,
        "left_bytes": candidate.left_bytes,
        "cost": dataclasses.asdict(candidate.cost) if candidate.cost is not None else None,
    }


def _verdict(candidate: Candidate) -> str:
    footprint = candidate.footprint
    total = f"{gib(footprint.surely + footprint.libraries)} to {gib(footprint.highest + footprint.libraries)} GiB"
    left = candidate.left_bytes
    return f"{total}, {gib(left)} GiB left" if candidate.fits else f"{total}, {over(left)}"


def _shortest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Of each backend, offload and recompute the largest micro-batch that fits; the smallest where none does."""
    chosen: dict[Any, Candidate] = {}
    for candidate in candidates:
        plan = candidate.plan
        key = (plan.backend, plan.offload, plan.recompute, plan.recompute_fits)
        before = chosen.get(key)
        if before is None or (candidate.fits and plan.micro_batch > before.plan.micro_batch):
            chosen[key] = candidate
    return list(chosen.values())


def _table(candidates: Sequence[Candidate], found: Survey) -> list[str]:
    timed, front = found.timed, found.front
    kinds = [kind for kind in KINDS if kind == "libraries" or any(c.footprint.bytes.get(kind) for c in candidates)]
    time = ["s/step", "tokens/s"] if timed else []
    rows = [["backend", "offload", "recompute", "micro", *time, "peak", *(_HEADS[kind] for kind in kinds), "fits"]]
    for candidate in candidates:
        plan, footprint = candidate.plan, candidate.footprint
        moved = [what[0] for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"]
        moved += ["disk"] if plan.offload.activations == "disk" and plan.backend != "stream" else []
        sizes = {**footprint.bytes, "libraries": footprint.libraries}
        rows.append(
            [
                plan.backend,
                "+".join(moved) or "-",
                recomputed(plan),
                str(plan.micro_batch),
                *(_time(candidate, starred=candidate in front) or ["-"] * len(time)),
                f"{gib(footprint.surely + footprint.libraries)}-{gib(footprint.highest + footprint.libraries)}",
                *(gib(sizes.get(kind, 0)) for kind in kinds),
                "yes" if candidate.fits else gib(-candidate.left_bytes),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _time(candidate: Candidate, *, starred: bool) -> list[str]:
    cost = candidate.cost
    if cost is None:
        return []
    return [f"{cost.seconds:.3g}", f"{'*' if starred else ''}{cost.tokens_per_second:,.0f}"]
