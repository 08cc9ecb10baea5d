"""Two ranks, every backend: its collectives' arithmetic and one step of training, compared between the backends."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardlab.doctor.check import Check
from shardlab.doctor.ranks import Ended, RankJob
from shardlab.runtime.extensions import zero_unavailable_reason

COLLECTIVES = "collectives"
BACKENDS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
RANKS = 2
TIMEOUT_SECONDS = 300.0
_TOLERANCE = 1e-5  # relative, of loss and gradient norm in fp32: as docs/same-loss.md has it


def check_backends(timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[Check]:
    """One check for the collectives and one for each backend. One that fails or hangs is not in the others' way."""
    left = [COLLECTIVES, *BACKENDS]
    missing = zero_unavailable_reason()
    if missing is not None:
        yield Check("zero1, zero2, zero3", "failed", missing)
        left = [name for name in left if not name.startswith("zero")]
    reference: dict[str, Any] | None = None
    while left:
        for result in _run(left, timeout_seconds):
            name = left.pop(0)
            if isinstance(result, Ended):
                yield _failed(name, result.cause)
                break
            if reference is None and name != COLLECTIVES:
                reference = result
            yield _judge(name, result, reference)


def _run(names: Sequence[str], timeout_seconds: float) -> Iterator[dict[str, Any] | Ended]:
    """The results for `names` in order, as they come; instead of the first that is missing, how the job ended."""
    module = "shardlab.doctor.selftest_job"
    with (
        tempfile.TemporaryDirectory(prefix="shardlab-") as directory,
        RankJob(module, [directory, *names], nproc=RANKS, timeout_seconds=timeout_seconds) as job,
    ):
        for name in names:
            file = Path(directory) / f"{name}.json"
            ended = None
            while not file.exists() and ended is None:
                ended = job.poll()
            if not file.exists():
                assert ended is not None
                yield ended
                return
            yield json.loads(file.read_text())


def _failed(name: str, why: str) -> Check:
    if name == COLLECTIVES:
        fix = "without them nothing runs on several ranks: look at the network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        return Check(f"{name}, {RANKS} ranks", "failed", why, fix)
    return Check(f"{name}, {RANKS} ranks", "failed", why, "use another backend (shard.backend)")


def _judge(name: str, result: dict[str, Any], reference: dict[str, Any] | None) -> Check:
    where = f"{name}, {RANKS} ranks"
    if name == COLLECTIVES or reference is None:
        return Check(where, "ok", f"all-reduce sums, reduce-scatter averages ({result['seconds']:.1f} s)")
    for figure in ("loss", "grad_norm"):
        mine, expected = result[figure], reference[figure]
        if not abs(mine - expected) <= _TOLERANCE * abs(expected):
            found = f"{figure} of the first step is {mine:.6f}, and that of the first backend {expected:.6f}"
            return Check(where, "failed", found, "its gradients are not to be trusted here: use another backend")
    return Check(where, "ok", f"one step, loss {result['loss']:.4f} ({result['seconds']:.1f} s)")
