"""How many sequences the two sides of a comparison train on per step, at the two ranks that it has."""

import math
from dataclasses import replace

from shardlab.doctor.configuration import Configuration
from shardlab.errors import UserError

RANKS = 2
_MICRO_BATCH, _MOST_ACCUMULATION = 2, 4


def difference(a: Configuration, b: Configuration) -> str | None:
    """Why the two can't be given the same sequences in each step; None if they can."""
    if a.global_batch_size is not None and b.global_batch_size is not None:
        if a.global_batch_size == b.global_batch_size:
            return None
        return f"a step is {a.global_batch_size} sequences in {a.file} and {b.global_batch_size} in {b.file}"
    for given, other in ((a, b), (b, a)):
        unit = _per_rank(other)
        if given.global_batch_size is not None and unit is not None and given.global_batch_size % unit:
            return (
                f"a step is {given.global_batch_size} sequences in {given.file}, and a multiple of {unit} in "
                f"{other.file} ({other.micro_batch} x accumulation {other.accumulation} on each rank)"
            )
    mine, theirs = _per_rank(a), _per_rank(b)
    if a.global_batch_size is None and b.global_batch_size is None and None not in (mine, theirs) and mine != theirs:
        return f"a step is {mine} sequences on each rank in {a.file} and {theirs} in {b.file}"
    return None


def _per_rank(side: Configuration) -> int | None:
    return None if side.micro_batch is None or side.accumulation is None else side.micro_batch * side.accumulation


def agree(a: Configuration, b: Configuration) -> tuple[Configuration, Configuration]:
    """Both with the same sequences per step, complete for two ranks; a step of many micro-batches has fewer here.

    To be called where there is no `difference`. Raises UserError where two ranks can't share a step out.
    """
    micros = [side.micro_batch for side in (a, b) if side.micro_batch is not None] or [_MICRO_BATCH]
    totals = [side.global_batch_size for side in (a, b) if side.global_batch_size is not None]
    totals += [share * RANKS for side in (a, b) if (share := _per_rank(side)) is not None]
    steps = max((side.accumulation or 1) for side in (a, b))
    total = totals[0] if totals else max(micros) * steps * RANKS
    if total % RANKS:
        raise UserError(f"{a.file}, {b.file}: {total} sequences per step can't be shared out to {RANKS} ranks")
    share = _fewer(total // RANKS, micros)
    return _complete(a, share, micros), _complete(b, share, micros)


def _fewer(share: int, micros: list[int]) -> int:
    """The sequences of a rank, but no more than a few micro-batches of each side: any number computes alike."""
    common = math.lcm(*micros)
    most = common * _MOST_ACCUMULATION
    return share if share <= most or share % common else most


def _complete(side: Configuration, share: int, micros: list[int]) -> Configuration:
    micro = side.micro_batch or (micros[0] if share % micros[0] == 0 else 1)
    if share % micro:
        raise UserError(
            f"{side.file}: {share} sequences on each of {RANKS} ranks are no multiple of micro-batch {micro}"
        )
    return replace(side, micro_batch=micro, accumulation=share // micro, global_batch_size=share * RANKS)
