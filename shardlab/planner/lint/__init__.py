"""The linter of ds_configs and accelerate files: what DeepSpeed and accelerate would do without a word, said before.

It imports neither torch nor DeepSpeed.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab.planner.lint.accelerate import lint_accelerate, lint_together, ranks_of
from shardlab.planner.lint.auto import autos, lint_auto, resolve_auto
from shardlab.planner.lint.batch import lint_batch
from shardlab.planner.lint.finding import Finding
from shardlab.planner.lint.keys import lint_keys
from shardlab.planner.lint.offload import lint_offload
from shardlab.planner.lint.precision import lint_clipping, lint_precision
from shardlab.planner.lint.sizes import Sizes, hidden_size, sizes_from_config, sizes_from_weights
from shardlab.planner.lint.stage import lint_stage

__all__ = [
    "Finding",
    "Sizes",
    "autos",
    "hidden_size",
    "lint_accelerate",
    "lint_ds_config",
    "resolve_auto",
    "sizes_from_config",
    "sizes_from_weights",
    "worst_first",
]

_ORDER = {"error": 0, "warning": 1, "note": 2}


def lint_ds_config(
    values: dict[str, Any],
    accelerate: dict[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    *,
    file: str = "ds_config",
    accelerate_file: str = "accelerate config",
    root: Path | None = None,
    ranks: int | None = None,
    sizes: Sizes | None = None,
    allow: Sequence[str] = (),
) -> list[Finding]:
    """All that is to be said of a ds_config, and of the accelerate file used with it, errors first.

    `file` and `accelerate_file` are what messages call them; `root` is where relative paths start (the working
    directory, as DeepSpeed has it); `ranks` the number of processes, if the accelerate file does not say; `sizes` the
    model's, if they are known better than from `model_config`; `allow` glob patterns of unknown keys that are meant.
    """
    if sizes is None and model_config is not None:
        sizes = sizes_from_config(model_config)
    processes = ranks_of(accelerate)
    from_file = f"{accelerate_file}: num_processes" if ranks is None and processes is not None else ""
    findings = [
        *lint_keys(values, file, allow),
        *lint_stage(values, file),
        *lint_batch(values, file, ranks or processes, from_file),
        *lint_clipping(values, file),
        *lint_precision(values, file),
        *lint_offload(values, file, sizes, root or Path()),
        *lint_auto(values, file, model_config),
    ]
    if accelerate is not None:
        findings += [*lint_accelerate(accelerate, accelerate_file)]
        findings += lint_together(values, file, accelerate, accelerate_file)
    return worst_first(findings)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes, each in their order."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])
