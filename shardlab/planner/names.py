"""Plans and sizes in words."""

from typing import Any

from shardlab.plan import Plan

_GIB = 1024**3


def name(plan: Plan) -> str:
    """A plan in a few words."""
    parts = [plan.backend, f"micro-batch {plan.micro_batch}"]
    parts += [f"recompute {recomputed(plan)}"] if plan.recompute != "none" else []
    moved = [what for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"]
    moved += {"cpu": ["activations"], "disk": ["activations to the disk"]}.get(plan.offload.activations, [])
    parts += [f"{' and '.join(moved)} offloaded"] if moved else []
    return ", ".join(parts)


def settings(plan: Plan) -> str:
    """What to give `--set` for it."""
    values: dict[str, Any] = {"backend": plan.backend, "micro_batch": plan.micro_batch, "recompute": plan.recompute}
    values |= {f"offload.{what}": "cpu" for what in ("parameters", "optimizer") if getattr(plan.offload, what) == "cpu"}
    values |= {"offload.activations": plan.offload.activations} if plan.offload.activations != "none" else {}
    values |= {"recompute": "auto"} if plan.recompute_fits else {}
    return " ".join(f"--set shard.{key}={value}" for key, value in values.items())


def recomputed(plan: Plan) -> str:
    """The policy, and of how many blocks where not of all."""
    if plan.recompute == "none" or plan.recompute_blocks is None:
        return "auto" if plan.recompute_fits else plan.recompute
    return f"{plan.recompute} of {plan.recompute_blocks} blocks"


def over(left_bytes: int) -> str:
    """By how much a plan does not fit."""
    return f"over by {gib(-left_bytes)} GiB"


def gib(size: int) -> str:
    """With as many digits as matter."""
    value = size / _GIB
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
