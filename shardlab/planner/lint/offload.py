"""Offload: what contradicts the stage, what the disk can't take, and optimizers that can't follow."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, described, enabled, is_number, section, stage_of
from shardlab.planner.lint.sizes import Sizes

_ZERO, _OPTIMIZER, _PARAMETERS = "zero_optimization", "offload_optimizer", "offload_param"
_ON_CPU = ("adam", "adamw", "adagrad", "lion")  # DeepSpeed has a version for the CPU
_ON_GPU = ("lamb", "onebitadam", "zerooneadam", "onebitlamb")  # compiled for a GPU
_GIB = 1024**3
# fp32 master, two moments of Adam, and the gradient that the update needs.
_OPTIMIZER_BYTES = 16


def lint_offload(values: dict[str, Any], file: str, sizes: Sizes | None, root: Path) -> Iterator[Finding]:
    """Findings on the offload of a ds_config, whose relative paths start at `root`.

    `sizes` are the model's, for the room that it takes on disk; None: only what can be said without.
    """
    stage = stage_of(values)
    devices = {name: _device(values, name) for name in (_OPTIMIZER, _PARAMETERS)}
    if devices[_PARAMETERS] != "none" and stage < 3:
        yield Finding(
            "error",
            file,
            f"{_ZERO}.{_PARAMETERS}.device",
            f"parameters can be offloaded at stage 3 only, and the stage is {stage}",
            f"set {_ZERO}.stage to 3, or remove {_PARAMETERS}",
        )
    if devices[_OPTIMIZER] != "none" and stage < 1:
        yield Finding(
            "error",
            file,
            f"{_ZERO}.{_OPTIMIZER}.device",
            "the optimizer can be offloaded from stage 1 on, and the stage is 0",
            f"set {_ZERO}.stage, or remove {_OPTIMIZER}",
        )
    if devices[_OPTIMIZER] == "nvme" and stage in (1, 2):
        yield Finding(
            "error",
            file,
            f"{_ZERO}.{_OPTIMIZER}.device",
            f"nvme works at stage 3 only: stage {stage} keeps the optimizer in host memory instead, in silence",
            "write cpu, or set the stage to 3",
        )
    yield from _disk(values, file, devices, sizes, root)
    if devices[_OPTIMIZER] != "none" and stage > 0:
        yield from _optimizer(values, file, stage)
    if "aio" in values and "nvme" not in devices.values():
        yield Finding("note", file, "aio", "nothing is offloaded to nvme, so it does nothing")


def _device(values: dict[str, Any], name: str) -> str:
    given = section(values, _ZERO, name)
    device = given.get("device", "none")
    if not given and section(values, _ZERO).get({_OPTIMIZER: "cpu_offload", _PARAMETERS: "cpu_offload_param"}[name]):
        return "cpu"  # the deprecated form
    return "none" if device in (None, AUTO) else str(device)


def _disk(
    values: dict[str, Any], file: str, devices: Mapping[str, str], sizes: Sizes | None, root: Path
) -> Iterator[Finding]:
    needed: dict[Path, int] = {}  # bytes by directory
    for name in (name for name, device in devices.items() if device == "nvme"):
        key = f"{_ZERO}.{name}.nvme_path"
        given = section(values, _ZERO, name).get("nvme_path")
        if not isinstance(given, str) or not given or given == AUTO:
            yield Finding(
                "error", file, key, "device is nvme, and there is no path", "give a directory on the NVMe disk"
            )
            continue
        path = root / given
        problem = _unusable(path)
        if problem is not None:
            yield Finding("error", file, key, f"{given} {problem}", f"make it, or name another (mkdir -p {given})")
        elif sizes is not None:
            needed[path] = needed.get(path, 0) + sizes.parameters * _bytes_each(values, name)
    for path, wanted in needed.items():
        free = shutil.disk_usage(path).free
        if free < wanted:
            message = f"{path} has {free / _GIB:.1f} GiB free, and this model's state takes {wanted / _GIB:.1f} GiB"
            yield Finding("error", file, f"{_ZERO}.*.nvme_path", message, "name a directory on a larger disk")
    yield from _buffer(values, file, devices, sizes)


def _unusable(path: Path) -> str | None:
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is not a directory"
    return None if os.access(path, os.W_OK | os.X_OK) else "can't be written to"


def _bytes_each(values: dict[str, Any], name: str) -> int:
    half = enabled(values, "fp16") or enabled(values, "bf16")
    return _OPTIMIZER_BYTES if name == _OPTIMIZER else 2 if half else 4


def _buffer(values: dict[str, Any], file: str, devices: Mapping[str, str], sizes: Sizes | None) -> Iterator[Finding]:
    if devices[_PARAMETERS] != "nvme" or sizes is None:
        return
    size = section(values, _ZERO, _PARAMETERS).get("buffer_size", 100_000_000)
    if is_number(size) and size < sizes.largest:
        yield Finding(
            "error",
            file,
            f"{_ZERO}.{_PARAMETERS}.buffer_size",
            f"{size:,.0f} elements are fewer than the model's largest tensor has ({sizes.largest:,}): DeepSpeed fails",
            f"set it to {sizes.largest} or more",
        )


def _optimizer(values: dict[str, Any], file: str, stage: int) -> Iterator[Finding]:
    kind = section(values, "optimizer").get("type")
    ratio = section(values, _ZERO, _OPTIMIZER).get("ratio")
    if is_number(ratio) and ratio < 1 and stage < 3:
        key = f"{_ZERO}.{_OPTIMIZER}.ratio"
        yield Finding("error", file, key, f"a part only ({ratio}) can be offloaded at stage 3, not {stage}")
    if kind is None:
        if values.get("zero_force_ds_cpu_optimizer", True):
            yield Finding(
                "warning",
                file,
                f"{_ZERO}.{_OPTIMIZER}",
                "DeepSpeed refuses a script's own torch optimizer here (accelerate replaces it by DeepSpeedCPUAdam, "
                "which is compiled at the first start)",
                "set zero_force_ds_cpu_optimizer to false to keep the script's, or name an optimizer here",
            )
    elif str(kind).lower() in _ON_GPU:
        yield Finding(
            "error",
            file,
            "optimizer.type",
            f"{described(kind)} runs on a GPU, and its state is offloaded to the CPU",
            "use AdamW, Adam, Adagrad or Lion, or don't offload the optimizer",
        )
    elif str(kind).lower() not in _ON_CPU or section(values, "optimizer", "params").get("torch_adam"):
        yield Finding(
            "warning",
            file,
            "optimizer.type",
            f"{described(kind)} steps on the CPU without DeepSpeed's own kernels, which is several times slower",
            "use AdamW, Adam, Adagrad or Lion (and no torch_adam)",
        )
