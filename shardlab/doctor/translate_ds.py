"""A ds_config -> what it has DeepSpeed compute: the config itself, but for what two ranks here can't have."""

import json
from copy import deepcopy
from typing import Any

from shardlab.doctor.configuration import SCRIPTS_OWN, Configuration, Setting, optimizer_in_words
from shardlab.errors import UserError
from shardlab.plan import Precision

_AUTO = "auto"
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's defaults
# Sections that change nothing of what is computed, and would write files or print.
_LEFT_OUT = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "timers")
_CANNOT = ("pipeline", "data_efficiency", "tensor_parallel", "expert_parallel", "hybrid_engine", "compile",
           "weight_quantization", "sequence_parallel_size", "torch_autocast", "msamp")  # fmt: skip


def from_ds_config(values: dict[str, Any], file: str) -> Configuration:
    """Raises UserError for what can't be run here."""
    for key in _CANNOT:
        if values.get(key):
            raise UserError(f"{file}: {key} can't be run here; compare without it")
    config = deepcopy(values)
    notes: list[str] = []
    for key in _LEFT_OUT:
        config.pop(key, None)
    precision = _precision(config, file)
    clip, clip_words = _clip(config)
    _offload(config, file)
    _left_to_the_program(config, notes)
    _optimizer(config, file, notes)
    _width(config, notes)
    left = [path for path in _autos(config) if path not in ((_TOTAL,), (_MICRO,), (_STEPS,))]
    if left:
        raise UserError(f'{file}: {".".join(left[0])} is "auto", which the file leaves to a program; write its value')
    sizes = {key: config.pop(key, None) for key in (_TOTAL, _MICRO, _STEPS)}
    numbers = {key: _size(value, key, file) for key, value in sizes.items()}
    optimizer, scheduler = config.get("optimizer"), config.get("scheduler")
    return Configuration(
        file=file,
        kind="ds_config",
        precision=precision,
        clip_grad_norm=clip,
        micro_batch=numbers[_MICRO],
        accumulation=numbers[_STEPS] or (1 if numbers[_TOTAL] is None and numbers[_MICRO] is not None else None),
        global_batch_size=numbers[_TOTAL],
        ds_config=config,
        optimizer=_as_recipe(optimizer),
        own_optimizer=optimizer is not None,
        own_schedule=scheduler is not None,
        settings={
            "clipping": clip_words,
            "precision": Setting(precision, f"{precision}.enabled" if precision != "fp32" else "neither fp16 nor bf16"),
            "optimizer": _optimizer_in_words(optimizer),
            "schedule": Setting(json.dumps(scheduler) if scheduler else SCRIPTS_OWN),
            **{key: Setting(json.dumps(config[key])) for key in _MATTERS if key in config},
        },
        notes=tuple(notes),
    )


def _as_recipe(optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The optimizer in a recipe's words, for a side that says none of its own; None where a recipe has none such."""
    if optimizer is None or _name(optimizer) != "adamw":
        return None
    params = {**_ADAMW, **optimizer["params"]}
    return {"name": "adamw", **{key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}}


def _name(optimizer: dict[str, Any]) -> str:
    """What DeepSpeed makes of the name: Adam is AdamW unless it is told otherwise."""
    name = str(optimizer.get("type")).lower()
    return "adamw" if name == "adam" and optimizer["params"].get("adam_w_mode", True) else name


def _optimizer_in_words(optimizer: dict[str, Any] | None) -> Setting:
    if optimizer is None:
        return Setting(SCRIPTS_OWN)
    name = _name(optimizer)
    return Setting(optimizer_in_words(name, (_ADAMW if name == "adamw" else {}) | optimizer["params"]), "optimizer")


# Other top-level keys that change the numbers.
_MATTERS = (
    "gradient_allreduce_op",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "data_types",
)


def _precision(config: dict[str, Any], file: str) -> Precision:
    halves = {name: config.get(name, {}).get("enabled", False) for name in ("fp16", "bf16", "bfloat16")}
    for name, value in halves.items():
        if value == _AUTO:
            config[name]["enabled"] = False
    if halves["fp16"] not in (False, _AUTO):
        raise UserError(f"{file}: fp16.enabled can't be run here: its loss scale skips steps; compare in bf16 or fp32")
    return "bf16" if any(halves[name] not in (False, _AUTO) for name in ("bf16", "bfloat16")) else "fp32"


def _clip(config: dict[str, Any]) -> tuple[float | None, Setting]:
    """The limit, and where it comes from. "auto" is 1.0, for the HF Trainer and for accelerate."""
    given = config.get("gradient_clipping")
    if given == _AUTO:
        config["gradient_clipping"] = 1.0
        return 1.0, Setting("1", "gradient_clipping auto: what accelerate and the HF Trainer fill in")
    if given is None:
        return 1.0, Setting("1", "DeepSpeed's default, for there is no gradient_clipping")
    if not given:
        return None, Setting("off", "gradient_clipping 0")
    return float(given), Setting(f"{given:g}", "gradient_clipping")


def _offload(config: dict[str, Any], file: str) -> None:
    zero = config.get(_ZERO)
    for name in ("offload_optimizer", "offload_param"):
        given = zero.get(name) if isinstance(zero, dict) else None
        if isinstance(given, dict) and given.get("device") == "nvme":
            raise UserError(
                f"{file}: {_ZERO}.{name}.device nvme is not run here; compare with cpu, it computes the same"
            )
    # A script's own torch optimizer is what both sides have where the config names none.
    config.setdefault("zero_allow_untested_optimizer", True)
    config["zero_force_ds_cpu_optimizer"] = False


def _left_to_the_program(config: dict[str, Any], notes: list[str]) -> None:
    """An optimizer or scheduler with values that are "auto" is the program's, not the file's."""
    for key in ("optimizer", "scheduler"):
        if key in config and _autos({key: config[key]}):
            del config[key]
            notes.append(f"{key}: it has values that are auto, so it is taken for the script's")


def _optimizer(config: dict[str, Any], file: str, notes: list[str]) -> None:
    given = config.get("optimizer")
    if given is None:
        return
    kind = str(given.get("type")).lower()
    params = given.setdefault("params", {})
    if kind in ("adam", "adamw"):
        # Torch's, for DeepSpeed's would have to be compiled. Its own default of the decay is 0, torch's is not.
        if not params.get("torch_adam"):
            params["torch_adam"] = True
            notes.append("optimizer: torch's AdamW instead of DeepSpeed's, which would have to be compiled")
        params.setdefault("weight_decay", 0.0)
    elif kind in ("lamb", "lion", "muon", "onebitadam", "zerooneadam", "onebitlamb"):
        raise UserError(f"{file}: optimizer.type {given['type']} can't be run here; compare without the section")


def _width(config: dict[str, Any], notes: list[str]) -> None:
    """Bucket sizes left to the model's width: any will do, for they change nothing of what is computed."""
    zero = config.get(_ZERO)
    if not isinstance(zero, dict):
        return
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if zero.get(key) == _AUTO:
            del zero[key]
            notes.append(f"{_ZERO}.{key} auto: DeepSpeed's default")


def _autos(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    from shardlab.planner.lint import autos

    return list(autos(values, path))


def _size(value: Any, key: str, file: str) -> int | None:
    if value is None or value == _AUTO:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"{file}: {key} is {json.dumps(value)}; `shardlab doctor --ds-config` says what is wrong with it"
        )
    return value
