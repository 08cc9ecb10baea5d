"""`shardlab compare`: one recipe on every backend, and a table that shows that the losses agree."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardlab.errors import ExitCode, UserError
from shardlab.plan import BackendName
from shardlab.recipe import Recipe, dump_recipe
from shardlab.runtime.launch import launch
from shardlab.train.start import check

BACKENDS: tuple[BackendName, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp")
MiB = 1024**2


@dataclass(frozen=True)
class Row:
    """One run beside the first, on one process. Memory in bytes: the largest over the ranks, above the libraries'."""

    label: str
    world_size: int
    loss: float
    largest_difference: float  # over all steps' losses
    peak_bytes: int
    tokens_per_second: float


def compare(recipe: Recipe, nproc: int, output: Path, backends: Sequence[BackendName] = BACKENDS) -> Iterator[Row]:
    """Train on one process, then on `nproc` ranks with each backend, each run into a directory of its own in `output`.

    Raises UserError for a recipe that can't run so, before the first run; SystemExit with a failed run's code.
    """
    jobs: list[tuple[str, BackendName, int]] = [("one process", "ddp", 1)]
    jobs += [(f"{backend} x{nproc}", backend, nproc) for backend in backends]
    recipes = {label: _with_backend(recipe, backend, count) for label, backend, count in jobs}
    for label, _, count in jobs:
        check(recipes[label], count)
    reference: list[float] = []
    for label, _, count in jobs:
        directory = output / label.replace(" ", "-")
        _run(recipes[label], count, directory, output)
        losses = _losses(directory)
        reference = reference or losses
        summary = json.loads((directory / "summary.json").read_text())
        yield Row(
            label=label,
            world_size=count,
            loss=losses[-1],
            largest_difference=max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
            peak_bytes=max(
                peak - base
                for peak, base in zip(summary["peak_memory_bytes"], summary["base_memory_bytes"], strict=True)
            ),
            tokens_per_second=summary["tokens_per_second"],
        )


def _with_backend(recipe: Recipe, backend: BackendName, world_size: int) -> Recipe:
    shard = recipe.shard.model_copy(update={"backend": backend, "world_size": world_size})
    return recipe.model_copy(update={"shard": shard})


def _run(recipe: Recipe, nproc: int, directory: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"{directory.name}.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "shardlab", "train", str(file), "--output", str(directory), "--nproc", str(nproc)]
    with _stdout_to_stderr():
        code = launch(command, nproc)
    if code != ExitCode.DONE:
        raise SystemExit(code)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What the ranks say goes to stderr inside: stdout is for the comparison, which a script may read."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _losses(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [float(row["loss"]) for row in rows if row.get("loss") is not None]


def parse_backends(names: str | None) -> tuple[BackendName, ...]:
    """`names` separated by commas; all for None. Raises UserError for an unknown one."""
    if names is None:
        return BACKENDS
    chosen = [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in BACKENDS]
    if unknown:
        raise UserError(f"--backends: no backend {unknown[0]!r}; there are {', '.join(BACKENDS)}")
    return tuple(backend for backend in BACKENDS if backend in chosen)


def table(rows: Sequence[Row]) -> str:
    """The rows as people read them."""
    header = f"{'backend':<12} {'last loss':>10} {'largest difference':>19} {'peak MiB per rank':>18} {'tokens/s':>9}"
    lines = [
        f"{row.label:<12} {row.loss:>10.5f} {row.largest_difference:>19.1e} {row.peak_bytes / MiB:>18.0f} "
        f"{row.tokens_per_second:>9.0f}"
        for row in rows
    ]
    return "\n".join([header, *lines, "(difference: from one process, over all steps; memory: above the libraries')"])
