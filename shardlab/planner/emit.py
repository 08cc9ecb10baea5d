"""Files for other programs: the ds_config of a plan, and those in `ds_configs/`, which fit any model.

`python -m shardlab.planner.emit ds_configs` writes that directory again.

What makes the files in it work as they are with the `deepspeed` command, `accelerate` and the HF Trainer:

- Batch sizes are numbers. "auto" is filled in by accelerate and the Trainer only; `deepspeed` fails on it. There is no
  `train_batch_size`, so that it follows the number of ranks.
- `gradient_clipping` is written, at the Trainer's default: without the key DeepSpeed clips at 1.0 all the same.
- No precision where it can be left out: whoever starts the job says it (`--bf16`, `mixed_precision`), and a file that
  says something else is refused by the Trainer. Not so with NVMe: on a CPU DeepSpeed 0.19 swaps parameters as bf16
  whatever the config says (`Init._set_dtype`), so bf16 is what the file says.
- No optimizer: the script's own is used as it is, offloaded or not. DeepSpeed's CPU Adam would have to be compiled.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shardlab.backends.zero_config import deepspeed_config
from shardlab.plan import BackendName, Offload, Plan
from shardlab.planner.lint.tables import dead_keys

# For limits that have to be numbers: as if it were of Llama-3-8B's size, in tensors of its largest (the embedding).
REFERENCE_SIZES = (525_336_576,) * 15
NVME_PATH = "nvme_offload"  # in the working directory; DeepSpeed makes it
NVME_BUFFER_ELEMENTS = 600_000_000  # DeepSpeed refuses a buffer smaller than the largest tensor

_Place = Literal["none", "cpu", "nvme"]
# By name: stage, where the optimizer state goes, where the parameters go.
GENERAL: dict[str, tuple[int, _Place, _Place]] = {
    "zero1": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero3": (3, "none", "none"),
    "zero2_offload": (2, "cpu", "none"),
    "zero3_offload": (3, "cpu", "cpu"),
    "zero3_nvme": (3, "nvme", "nvme"),
}


def general_config(name: str) -> dict[str, Any]:
    """The ds_config `name` of `GENERAL`, for any model, any number of ranks and any device."""
    stage, optimizer, parameters = GENERAL[name]
    backends: dict[int, BackendName] = {1: "zero1", 2: "zero2", 3: "zero3"}
    plan = Plan(
        backend=backends[stage],
        world_size=1,
        micro_batch=1,
        accumulation=1,
        global_batch_size=1,
        precision="bf16" if optimizer == "nvme" else "fp32",
        offload=Offload("none" if parameters == "none" else "cpu", "none" if optimizer == "none" else "cpu"),
    )
    # Pinning is nothing to a CPU, and harmless.
    config = _without_dead_keys(deepspeed_config(plan, REFERENCE_SIZES, accelerator=True))
    del config["train_batch_size"]
    zero = config["zero_optimization"]
    if optimizer == "nvme":
        zero["offload_optimizer"] |= {"device": "nvme", "nvme_path": NVME_PATH}
        zero["offload_param"] |= {"device": "nvme", "nvme_path": NVME_PATH, "buffer_size": NVME_BUFFER_ELEMENTS}
    return config


def plan_config(plan: Plan, sizes: Sequence[int], *, accelerator: bool | None = None) -> str:
    """The ds_config of a ZeRO plan for a model whose parameters have `sizes` elements, as the text of a file.

    `accelerator`: whether it is for a machine that has one; None is this machine.
    """
    return as_text(_without_dead_keys(deepspeed_config(plan, sizes, accelerator=accelerator)))


def _without_dead_keys(config: dict[str, Any]) -> dict[str, Any]:
    """In place: what does nothing at the config's stage is not written."""
    zero = config["zero_optimization"]
    for key in dead_keys(zero):
        del zero[key]
    return config


def as_text(config: dict[str, Any]) -> str:
    """A ds_config as the text of a JSON file."""
    return json.dumps(config, indent=2) + "\n"


def write_general(directory: Path) -> list[Path]:
    """Write every file of `GENERAL` into `directory`; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.json" for name in GENERAL]
    for path in paths:
        path.write_text(as_text(general_config(path.stem)), encoding="utf-8")
    return paths


if __name__ == "__main__":
    write_general(Path(sys.argv[1]))
