"""A survey for people, and for scripts."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from shardlab.plan import KINDS, Plan
from shardlab.planner.search import RULE, Candidate, Survey, nearest

_GIB = 1024**3
_HEADS = {
    "parameters": "weights",
    "gradients": "grads",
    "masters": "masters",
    "moments": "moments",
    "activations": "activ.",
    "head": "head",
    "communication": "comm.",
    "temporaries": "temp.",
    "libraries": "libs",
}


def text(found: Survey, *, every: bool = False) -> str:
    """Model and machine, the table, the choice and the rule behind it."""
    machine = found.machine
    lines = [
        f"{found.parameters / 1e6:,.1f}M parameters, {found.trainable / 1e6:,.1f}M of them trained; "
        f"{machine.ranks} x {gib(machine.memory_bytes)} GiB ({machine.name})",
        "predicted peak of a rank in GiB, low to high, and by kind at the moment of the peak; what does not fit is over"
        " by the figure in the last column",
        "",
        *_table(found.candidates if every else _shortest(found.candidates)),
        "",
    ]
    if found.own is not None:
        lines.append(f"the recipe's own plan, {name(found.own.plan)}: {_verdict(found.own)}")
        lines.append(f"  its peak is in the {found.own.footprint.moment}")
    best = found.best
    if best is None:
        closest = nearest(found.candidates)
        lines.append(f"nothing fits; the nearest is {name(closest.plan)}, {_verdict(closest)}")
    else:
        lines.append(f"best that fits: {name(best.plan)} ({settings(best.plan)})")
    lines.append(f"rule: {RULE}")
    return "\n".join(lines)


def as_dict(found: Survey) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "machine": dataclasses.asdict(found.machine),
        "parameters": found.parameters,
        "trainable": found.trainable,
        "recipe": candidate_dict(found.own) if found.own is not None else None,
        "candidates": [candidate_dict(candidate) for candidate in found.candidates],
        "best": candidate_dict(found.best) if found.best is not None else None,
        "rule": RULE,
    }


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """One of them."""
    plan = candidate.plan
    return {
        "backend": plan.backend,
        "offload": dataclasses.asdict(plan.offload),
        "recompute": plan.recompute,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "world_size": plan.world_size,
        "footprint": dataclasses.asdict(candidate.footprint),
        "fits": candidate.fits,
        "left_bytes": candidate.left_bytes,
    }


def name(plan: Plan) -> str:
    """A plan in a few words."""
    parts = [plan.backend, f"micro-batch {plan.micro_batch}"]
    parts += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    moved = [what for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"]
    parts += [f"{' and '.join(moved)} offloaded"] if moved else []
    return ", ".join(parts)


def settings(plan: Plan) -> str:
    """What to give `--set` for it."""
    values: dict[str, Any] = {"backend": plan.backend, "micro_batch": plan.micro_batch, "recompute": plan.recompute}
    values |= {f"offload.{what}": "cpu" for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"}
    return " ".join(f"--set shard.{key}={value}" for key, value in values.items())


def _verdict(candidate: Candidate) -> str:
    footprint = candidate.footprint
    total = f"{gib(footprint.low + footprint.libraries)} to {gib(footprint.high + footprint.libraries)} GiB"
    return f"{total}, {gib(candidate.left_bytes)} GiB left" if candidate.fits else f"{total}, {_over(candidate)}"


def _over(candidate: Candidate) -> str:
    return f"over by {gib(-candidate.left_bytes)} GiB"


def _shortest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Of each backend, offload and recompute the largest micro-batch that fits; the smallest where none does."""
    chosen: dict[Any, Candidate] = {}
    for candidate in candidates:
        key = (candidate.plan.backend, candidate.plan.offload, candidate.plan.recompute)
        before = chosen.get(key)
        if before is None or (candidate.fits and candidate.plan.micro_batch > before.plan.micro_batch):
            chosen[key] = candidate
    return list(chosen.values())


def _table(candidates: Sequence[Candidate]) -> list[str]:
    kinds = [kind for kind in KINDS if kind == "libraries" or any(c.footprint.bytes.get(kind) for c in candidates)]
    rows = [["backend", "offload", "recompute", "micro", "peak", *(_HEADS[kind] for kind in kinds), "fits"]]
    for candidate in candidates:
        plan, footprint = candidate.plan, candidate.footprint
        moved = [what[0] for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"]
        sizes = {**footprint.bytes, "libraries": footprint.libraries}
        rows.append(
            [
                plan.backend,
                "+".join(moved) or "-",
                plan.recompute,
                str(plan.micro_batch),
                f"{gib(footprint.low + footprint.libraries)}-{gib(footprint.high + footprint.libraries)}",
                *(gib(sizes.get(kind, 0)) for kind in kinds),
                "yes" if candidate.fits else gib(-candidate.left_bytes),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def gib(size: int) -> str:
    """With as many digits as matter."""
    value = size / _GIB
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
