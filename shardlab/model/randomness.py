"""Random numbers as a pure function of (seed, step, micro-batch, segment).

Each segment seeds the generators when it is entered, and again when it is recomputed. Dropout is thus the same at every
world size, accumulation and backend that uses the same micro-batch, and a resumed run needs no generator's state.
"""

import hashlib
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """One 63-bit seed from several integers (a splitmix64 step for each); changing any of them changes it."""
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_seed(seed: int, name: str) -> int:
    """The seed of a named tensor's initial values: independent of the order in which tensors are made."""
    return mix(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


@dataclass
class StepRandom:
    """Where the run is; the backend moves it on before each micro-batch, segments read it."""

    seed: int
    step: int = 0
    micro_batch: int = 0

    def enter(self, segment: int) -> None:
        """Seed every device's generator for `segment`."""
        seed = mix(self.seed, self.step, self.micro_batch, segment)
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            # torch.manual_seed also keeps the seed for a GPU that may yet appear, with a formatted stack trace: 0.3 ms.
            torch.default_generator.manual_seed(seed)
