"""`recompute: auto`: the fewest blocks that have to be run again for a step to fit."""

from dataclasses import replace

from shardlab.errors import UserError
from shardlab.plan import Footprint, Plan
from shardlab.planner.machine import Machine
from shardlab.planner.names import gib
from shardlab.planner.predict import Predictor


def fewest_recomputed(plan: Plan, predict: Predictor, machine: Machine) -> Plan:
    """`plan` with as few blocks run again as fit its limit, or the machine's memory.

    Raises UserError with need and have where not even running all of them again fits, or where the limit is more than
    the machine has.
    """
    have = machine.memory_bytes if plan.memory_limit is None else plan.memory_limit
    if have > machine.memory_bytes:
        raise UserError(
            f"shard.memory_limit is {gib(have)} GiB, and {machine.name} has {gib(machine.memory_bytes)} for each rank: "
            "lower it"
        )
    without = replace(plan, recompute="none", recompute_blocks=None)
    if _needs(predict.footprint(without)) <= have:
        return without
    blocks = predict.shape.blocks
    least = predict.footprint(_again(plan, blocks))
    if _needs(least) > have:
        raise UserError(
            f"recompute auto: with every block run again this plan still needs {gib(_needs(least))} GiB on a rank, and "
            f"has {gib(have)}, in the {least.where}: see `shardlab plan` for what fits"
        )
    few, enough = 0, blocks  # numbers of blocks that are too few, and that are not
    while enough - few > 1:
        middle = (few + enough) // 2
        if _needs(predict.footprint(_again(plan, middle))) <= have:
            enough = middle
        else:
            few = middle
    return _again(plan, enough)


def _again(plan: Plan, count: int) -> Plan:
    return replace(plan, recompute="full", recompute_blocks=count)


def _needs(footprint: Footprint) -> int:
    """At the upper end, over the whole run, as a plan is said to fit or not."""
    return footprint.highest + footprint.libraries
