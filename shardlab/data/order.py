"""The order of samples: a permutation that is computed where it is needed and stored nowhere.

A shuffle of a billion rows as an array would cost gigabytes on every rank. A Feistel network is a bijection of
`[0, 4^bits)` whatever its round function is; walking its cycles until they come back below `length` makes it one of
`[0, length)` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So any position of any epoch is
a pure function of (position, length, seed), the same on every rank and at every world size.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def rows_at(positions: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    """Row index at each global sample position 0, 1, 2, ...; each epoch of `length` positions has its own order."""
    epochs, within = np.divmod(positions, length)
    return permutation(within, length, seed, epochs)


def permutation(
    positions: NDArray[np.int64], length: int, seed: int, epoch: int | NDArray[np.int64] = 0
) -> NDArray[np.int64]:
    """Where a bijection of `[0, length)`, chosen by `seed` and `epoch`, sends `positions`; same shape.

    Raises ValueError if a position is outside `[0, length)`.
    """
    positions = np.asarray(positions, dtype=np.int64)
    if length < 1 or (positions.size and (positions.min() < 0 or positions.max() >= length)):
        raise ValueError(f"positions must lie in [0, {length})")
    half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, np.broadcast_to(np.asarray(epoch), positions.shape))
    result = _feistel(positions.astype(np.uint64), half_bits, keys)
    # The domain is under 8 times the length (4 from length 3 on), so each walk ends after a few steps.
    while (outside := result >= np.uint64(length)).any():
        result[outside] = _feistel(result[outside], half_bits, keys[:, outside])
    return result.astype(np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = np.asarray(values, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around in silence
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys `(rounds, *epochs.shape)`."""
    seeds = mix(np.full(epochs.shape, seed % 2**64, dtype=np.uint64))
    base = mix(seeds ^ epochs.astype(np.uint64))
    return np.stack([mix(base ^ np.uint64(number)) for number in range(_ROUNDS)])


def _feistel(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half_bits) | right
