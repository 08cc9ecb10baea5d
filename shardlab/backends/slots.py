"""Where in a piece of shared memory each collective's buffer lies: arithmetic, for the exchange and for the footprint.

A buffer is read by peers for a while after its owner has gone on. So buffers lie in turn at the two ends of the piece:
where two that follow each other don't overlap, the next may be filled while the last is still being read, and only
where they do must the ranks wait for each other once more.
"""

from collections.abc import Iterator, Sequence

ALIGNMENT = 64  # bytes: a cache line, and no number that a tensor may hold is larger


class Slots:
    """The places of buffers in a piece of `size` bytes."""

    def __init__(self, size: int):
        self.size = size
        self._right = False
        self._last = range(0)

    def place(self, size: int) -> tuple[int, bool]:
        """(offset of a buffer of `size` bytes, whether it overlaps the one before it).

        Raises ValueError where it is larger than the piece.
        """
        if size > self.size:
            raise ValueError(f"a buffer of {size} bytes in shared memory of {self.size}")
        offset = (self.size - size) // ALIGNMENT * ALIGNMENT if self._right else 0
        self._right = not self._right
        place = range(offset, offset + size)
        overlaps = max(place.start, self._last.start) < min(place.stop, self._last.stop)
        self._last = place
        return offset, overlaps


def capacity(blocks: Sequence[int], others: Sequence[int]) -> int:
    """Bytes that are enough for the buffers of any unit, and for those of two blocks beside each other."""
    size = max([0, *(2 * (block + ALIGNMENT) for block in blocks), *others])
    return -(-size // ALIGNMENT) * ALIGNMENT


def read_from_peer(order: Sequence[int], piece: int, ranks: int) -> int:
    """Bytes of one peer's piece that the rank which reads most of it ever reads.

    `order` is the sizes of the buffers that are reduced in a micro-batch: of each a rank reads its part.
    """
    return max((_covered(list(_parts(order, piece, ranks, rank))) for rank in range(ranks)), default=0)


def _parts(order: Sequence[int], piece: int, ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    slots = Slots(piece)
    for size in (*order, *order):  # the second time at the other ends, where their number is odd
        offset, _ = slots.place(size)
        yield offset + rank * size // ranks, offset + (rank + 1) * size // ranks


def _covered(parts: list[tuple[int, int]]) -> int:
    total = reached = 0
    for start, stop in sorted(parts):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
