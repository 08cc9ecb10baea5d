"""Backend stream within a memory limit: how much of the blocks' inputs stays in memory, or that nothing fits."""

from dataclasses import replace

from shardlab.errors import UserError
from shardlab.plan import Footprint, Plan
from shardlab.planner.machine import Machine
from shardlab.planner.names import gib
from shardlab.planner.predict import Predictor

# A limit holds pages of files too, which the kernel drops and reads again where there is no room. Those of the
# libraries' code are in use all the time (122 to 142 MiB were resident): without room for them a run crawls.
CODE_BYTES = 160 * 1024**2


def fitted(plan: Plan, predict: Predictor, machine: Machine) -> Plan:
    """`plan` with as many of the blocks' inputs in memory as its limit has room for.

    Where activations may go to the disk, first as many blocks' own as pay are not run again.

    Raises UserError with need and have where the smallest schedule is still larger than the limit, which may not be
    more than the machine has.
    """
    have = limit_bytes(plan, machine)
    if plan.offload.activations == "disk":
        plan = _spilling(plan, predict, machine, have)
    if needs(predict.footprint(_keeping(plan, None))) <= have:
        return _keeping(plan, None)
    least = predict.footprint(_keeping(plan, 0))
    if needs(least) > have:
        mend = "set shard.micro_batch=1, or " if plan.micro_batch > 1 else ""
        raise UserError(
            f"backend stream needs {gib(needs(least))} GiB of memory for this recipe at the least, and has "
            f"{gib(have)} ({_whose(plan, machine)}), in the {least.moment}: {mend}shorten data.sequence_length or "
            "train.global_batch_size, or raise the limit"
        )
    size = predict.window_bytes(plan)
    fits, over = 0, predict.shape.blocks  # numbers of blocks whose inputs fit, and do not
    while over - fits > 1:
        middle = (fits + over) // 2
        if needs(predict.footprint(_keeping(plan, middle * size))) <= have:
            fits = middle
        else:
            over = middle
    return _keeping(plan, fits * size)


def _spilling(plan: Plan, predict: Predictor, machine: Machine, have: int) -> Plan:
    """`plan` with as many blocks' own activations on the disk as its budget has room for and as save time.

    Where nothing is known of the machine's speed, that is as many as have room. The first block is always run again.
    """
    blocks, limit = predict.shape.blocks, plan.offload.disk_limit

    def keeping(count: int) -> Plan:
        return replace(plan, recompute_blocks=blocks - count)

    most = blocks - 1
    if not most or needs(predict.footprint(_keeping(keeping(1), 0))) > have:
        return keeping(0)  # the buffers that they come and go by are too much
    if limit is not None:
        most = min(most, limit // predict.away_bytes(keeping(1)))
    costs = [predict.cost(keeping(count), machine) for count in range(most + 1)]
    seconds = [one.seconds for one in costs if one is not None]
    if len(seconds) < len(costs):
        return keeping(most)
    return keeping(min(range(most + 1), key=lambda count: (seconds[count], count)))


def limit_bytes(plan: Plan, machine: Machine) -> int:
    """What the process may take. Raises UserError where the machine does not have what the recipe grants."""
    limit = plan.stream.memory_limit
    if limit is not None and limit > machine.memory_bytes:
        raise UserError(
            f"shard.memory_limit is {gib(limit)} GiB, and {machine.name} has {gib(machine.memory_bytes)}: lower it"
        )
    return machine.memory_bytes if limit is None else limit


def needs(footprint: Footprint) -> int:
    """At the upper end, libraries and the pages of their code included."""
    return footprint.high + footprint.libraries + CODE_BYTES


def _keeping(plan: Plan, activation_bytes: int | None) -> Plan:
    return replace(plan, stream=replace(plan.stream, activation_bytes=activation_bytes))


def _whose(plan: Plan, machine: Machine) -> str:
    return "shard.memory_limit" if plan.stream.memory_limit is not None else machine.name
