"""`shard.backend: auto` -> the plan that a survey would choose, of those that agree with what the recipe does say."""

from collections.abc import Callable
from dataclasses import replace

from shardlab.plan import Offload, Plan
from shardlab.planner.explain import choice
from shardlab.planner.names import name, over
from shardlab.planner.search import Candidate, Survey, nearest
from shardlab.recipe import Recipe


def is_open(recipe: Recipe, ruled: Plan) -> bool:
    """Whether there is a backend to choose; `ruled` is the recipe's plan by `resolve`.

    Only fsdp has replicas, and a survey moves no activations.
    """
    return recipe.shard.backend == "auto" and ruled.replicas == 1 and ruled.offload.activations == "none"


def agreeing(recipe: Recipe, ruled: Plan) -> Callable[[Plan], bool]:
    """Whether a plan is one that the recipe leaves open.

    How many blocks are run again is found later, within the recipe's own limit.
    """

    def agrees(plan: Plan) -> bool:
        sized = recipe.shard.micro_batch == "auto" or plan.micro_batch == ruled.micro_batch
        again = plan.recompute in ("none", "full") if ruled.recompute_fits else plan.recompute == ruled.recompute
        return sized and again and plan.offload == ruled.offload and not plan.recompute_fits

    return agrees


def choose(found: Survey, ruled: Plan) -> Plan:
    """The best of `found` that `ruled`'s recipe leaves open; with it, in its reasons, why.

    Where none fits: backend stream where it can run, else the one that misses by the least.
    """
    agrees, less = agreeing(found.recipe, ruled), 0
    if ruled.memory_limit is not None:
        less = max(0, found.machine.memory_bytes - ruled.memory_limit)
    candidates = (replace(c, left_bytes=c.left_bytes - less) for c in found.candidates if agrees(c.plan))
    left = replace(found, candidates=tuple(candidates))
    if not left.candidates:
        return ruled
    chosen, why = _best(left, ruled)
    reasons = [f"backend auto = {chosen.backend}: {why}"]
    if found.recipe.shard.micro_batch == "auto":
        reasons += [f"micro_batch auto = {chosen.micro_batch}, with it"]
    base = chosen if chosen.backend == "stream" else ruled  # what is recomputed may be left to be found
    return replace(
        base,
        backend=chosen.backend,
        micro_batch=chosen.micro_batch,
        accumulation=chosen.accumulation,
        reasons=tuple(reasons),
    )


def _best(left: Survey, ruled: Plan) -> tuple[Plan, str]:
    best = left.best
    if best is not None:
        why = f"the fastest that fits; {choice(left)}" if left.timed else f"the first that fits, {left.rule}"
        return best.plan, why
    closest = nearest(left.candidates)
    missed = f"{name(closest.plan)}, is {over(closest.left_bytes)}"
    if _streams(left.stream, ruled):
        assert left.stream is not None
        return left.stream.plan, f"in memory nothing fits, the nearest, {missed}: its state goes to the disk"
    return closest.plan, f"nothing fits; the nearest, {missed}"


def _streams(stream: Candidate | None, ruled: Plan) -> bool:
    return stream is not None and stream.fits and ruled.offload == Offload() and ruled.recompute != "selective"
