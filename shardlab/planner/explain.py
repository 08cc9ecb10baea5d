"""Why a plan was chosen, and why each other was not."""

from collections.abc import Iterator

from shardlab.planner.cost import Cost
from shardlab.planner.names import name, over
from shardlab.planner.search import SAME_TIME, Candidate, Survey


def choice(found: Survey) -> str:
    """The fastest that fits, its time, and what it saves beside the next of another kind. There is one, with a cost."""
    best = found.fitting[0]
    assert best.cost is not None
    said = (
        f"{name(best.plan)}: {best.cost.seconds:.3g} s a step, {best.cost.tokens_per_second:,.0f} tokens/s "
        f"(within {best.cost.error:.0%})"
    )
    faster = [c for c in found.candidates if not c.fits and c.cost is not None and c.cost.seconds < best.cost.seconds]
    if faster:
        said += f"; {len(faster)} that would be faster {'does' if len(faster) == 1 else 'do'} not fit"
    rival = next((c for c in found.fitting[1:] if _kind(c) != _kind(best)), None)
    if rival is None or rival.cost is None:
        return said
    return f"{said}; next is {name(rival.plan)}, {_slower(rival.cost, best.cost)}"


def _kind(candidate: Candidate) -> tuple[object, ...]:
    plan = candidate.plan
    return plan.backend, plan.offload, plan.recompute, plan.recompute_fits


def reasons(found: Survey) -> Iterator[tuple[Candidate, str]]:
    """Each candidate but the best, with why it is not that."""
    best = found.best
    for candidate in found.candidates:
        if candidate is best:
            continue
        if not candidate.fits:
            yield candidate, f"does not fit, {over(candidate.left_bytes)}, in the {candidate.footprint.where}"
        elif best is None or best.cost is None or candidate.cost is None:
            yield candidate, "fits, and comes later by the rule"
        else:
            yield candidate, f"fits, {_slower(candidate.cost, best.cost)}"


def _slower(other: Cost, best: Cost) -> str:
    """By how much, and what most of it is."""
    share = other.seconds / best.seconds
    if share <= SAME_TIME:
        return "as fast, and comes later by the rule"
    more = {part: seconds - best.parts.get(part, 0.0) for part, seconds in other.parts.items()}
    part = max(more, key=lambda key: more[key])
    return f"{share - 1:.0%} slower, most of it {_WORDS[part]} (+{more[part]:.3g} s)"


_WORDS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "communication": "in communication",
    "copies": "copying around collectives",
    "update": "in the optimizer's update",
    "offload": "moving offloaded state",
    "disk": "waiting for the disk",
}
