"""Comparison with one process, which is the reference for every backend."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tests.distributed.jobs import Arrays, Case

BACKENDS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
SHARDING = BACKENDS[1:]


def in_one_process(case: Case) -> Case:
    """The same job without sharding, offload, recompute or compiled blocks."""
    return replace(
        case,
        backend="ddp",
        offload="none",
        activations="none",
        recompute="none",
        compile=False,
        evaluate_first=False,
        threshold=0,
    )


def relative(value: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Relative L2 difference."""
    difference = np.linalg.norm(value.astype(np.float64) - reference)
    return float(difference / max(np.linalg.norm(reference.astype(np.float64)), 1e-30))


def assert_tensors_agree(values: Arrays, references: Arrays, tolerance: float) -> None:
    """Every tensor, by name, to a relative L2 difference of `tolerance`."""
    assert values.keys() == references.keys()
    differences = {name: relative(values[name], references[name]) for name in references}
    beyond = {name: difference for name, difference in differences.items() if not difference <= tolerance}
    assert not beyond


def assert_bit_equal(values: Arrays, references: Arrays) -> None:
    """Every tensor, by name, in every bit."""
    assert values.keys() == references.keys()
    assert [name for name in references if not np.array_equal(values[name], references[name])] == []


def changes(before: Arrays, after: Arrays) -> Arrays:
    """What was added to each tensor."""
    return {name: after[name] - before[name] for name in before}


def assert_close(values: Sequence[float], references: Sequence[float], tolerance: float) -> None:
    """Each value to a relative difference of `tolerance`."""
    np.testing.assert_allclose(values, references, rtol=tolerance, atol=0)
