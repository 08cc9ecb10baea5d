"""Who writes what of the state that several ranks hold alike."""

from collections.abc import Sequence
from itertools import accumulate


def shares(sizes: Sequence[int], rank: int, ranks: int) -> list[tuple[int, int]]:
    """The range [start, stop) of each of several flattened tensors, of `sizes` elements, that `rank` writes.

    Over all `ranks` each element is in exactly one range, and no rank has more than one element more than another.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    total = sum(sizes)
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    begins = accumulate(sizes, initial=0)
    return [
        (min(max(first - begin, 0), size), min(max(last - begin, 0), size))
        for begin, size in zip(begins, sizes, strict=False)
    ]
