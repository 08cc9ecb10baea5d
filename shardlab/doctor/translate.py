"""A configuration file -> what it has a job compute. What can't be run here is an error that names the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.doctor.configuration import Configuration, Setting, optimizer_in_words
from shardlab.doctor.files import named_ds_config, read_accelerate, read_json, read_yaml
from shardlab.doctor.translate_ds import from_ds_config
from shardlab.errors import UserError
from shardlab.plan import BackendName, Precision, Recompute
from shardlab.recipe import Recipe, load_recipe

RANKS = 2
_ACCELERATE_KEYS = ("distributed_type", "compute_environment", "deepspeed_config", "fsdp_config")


def read_configuration(file: Path) -> Configuration:
    """The configuration in a recipe, a ds_config or an accelerate file. Raises UserError."""
    values = read_json(file, "a ds_config") if file.suffix == ".json" else read_yaml(file, "a configuration")
    if any(key in values for key in _ACCELERATE_KEYS):
        return _from_accelerate(read_accelerate(file), file)
    if file.suffix == ".json":
        return from_ds_config(values, str(file))
    return _from_recipe(load_recipe(file), str(file))


def _from_recipe(recipe: Recipe, file: str) -> Configuration:
    from shardlab.planner import resolve

    recipe = recipe.model_copy(update={"shard": recipe.shard.model_copy(update={"world_size": None})})
    plan = resolve(recipe, world_size=RANKS)
    train = recipe.train
    clip = "off" if plan.clip_grad_norm is None else f"{plan.clip_grad_norm:g}"
    return Configuration(
        file=file,
        kind="plan",
        backend=plan.backend,
        precision=plan.precision,
        clip_grad_norm=plan.clip_grad_norm,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        global_batch_size=plan.global_batch_size,
        offload_parameters=plan.offload.parameters != "none",
        offload_optimizer=plan.offload.optimizer != "none",
        recompute=plan.recompute,
        reshard_after_forward=plan.reshard_after_forward,
        seed=plan.seed,
        optimizer=train.optimizer.model_dump(mode="json") | {"groups": []},
        schedule=train.schedule.model_dump(mode="json"),
        steps=train.steps,
        settings={
            "clipping": Setting(clip, "train.clip_grad_norm"),
            "precision": Setting(plan.precision, "train.precision"),
            "optimizer": Setting(optimizer_in_words(train.optimizer.name, train.optimizer.model_dump(mode="json"))),
            "schedule": Setting(json.dumps(train.schedule.model_dump(mode="json"))),
        },
        notes=("train.optimizer.groups are left out",) if train.optimizer.groups else (),
        model=_recipe_model(recipe),
    )


def _recipe_model(recipe: Recipe) -> dict[str, Any] | None:
    if recipe.model.config is not None:
        return read_json(Path(recipe.model.config), "a model's config")
    if recipe.model.path is not None:
        return read_json(Path(recipe.model.path) / "config.json", "a model's config")
    return None


def _from_accelerate(values: dict[str, Any], file: Path) -> Configuration:
    for key in ("megatron_lm_config", "parallelism_config", "fp8_config"):
        if values.get(key):
            raise UserError(f"{file}: {key} can't be run here; compare without it")
    for key in ("dynamo_backend", "dynamo_config"):
        if values.get(key) not in (None, "NO", "no", {}):
            raise UserError(f"{file}: {key}: compiled code rounds in its own way; compare without it")
    precision = _precision(values, file)
    match values.get("distributed_type"):
        case "FSDP":
            return _from_fsdp(values, file, precision)
        case "DEEPSPEED":
            return _from_plugin(values, file, precision)
        case "NO" | "MULTI_GPU" | "MULTI_CPU":
            return _accelerate(file, precision, "ddp", "MULTI_GPU")
        case other:
            raise UserError(f"{file}: distributed_type {other} can't be run here")


def _precision(values: Mapping[str, Any], file: Path) -> Precision:
    match values.get("mixed_precision", "no"):
        case "no" | False | None:
            return "fp32"
        case "bf16":
            return "bf16"
        case other:
            raise UserError(f"{file}: mixed_precision {other} can't be run here; compare in bf16 or without")


def _accelerate(file: Path, precision: Precision, backend: BackendName, name: str, **more: Any) -> Configuration:
    words = "no" if precision == "fp32" else precision
    return Configuration(
        file=str(file),
        kind="plan",
        backend=backend,
        precision=precision,
        settings={
            "clipping": Setting("off", f"accelerate with {name} leaves it to the script: accelerator.clip_grad_norm_"),
            "precision": Setting(precision, f"mixed_precision {words}"),
        },
        **more,
    )


# Keys of fsdp_config that change nothing of what is computed.
_FSDP_LAYOUT = {
    "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch",
    "forward_prefetch", "state_dict_type", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states",
}  # fmt: skip


def _from_fsdp(values: dict[str, Any], file: Path, precision: Precision) -> Configuration:
    given = {key.removeprefix("fsdp_"): value for key, value in (values.get("fsdp_config") or {}).items()}
    strategy = str(given.pop("sharding_strategy", "FULL_SHARD")).upper()
    reshard = str(given.pop("reshard_after_forward", "true")).upper()
    offload = str(given.pop("offload_params", "false")).lower() == "true"
    recompute: Recompute = "full" if str(given.pop("activation_checkpointing", "false")).lower() == "true" else "none"
    if given.pop("activation_checkpointing_offload", False) not in (False, "false"):
        raise UserError(f"{file}: fsdp_config.fsdp_activation_checkpointing_offload can't be run here")
    unknown = sorted(set(given) - _FSDP_LAYOUT)
    if unknown:
        raise UserError(
            f"{file}: fsdp_config.fsdp_{unknown[0]} can't be run here; `shardlab doctor --accelerate` lints"
        )
    words = {strategy, reshard}
    if words & {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}:
        raise UserError(f"{file}: fsdp_config: hybrid sharding needs two hosts and can't be run here")
    backend: BackendName = "ddp" if words & {"NO_SHARD", "NO_RESHARD"} and strategy == "NO_SHARD" else "fsdp"
    return _accelerate(
        file,
        precision,
        backend,
        "FSDP",
        offload_parameters=offload,
        offload_optimizer=offload,
        recompute=recompute,
        reshard_after_forward=not words & {"SHARD_GRAD_OP", "FALSE", "NO_RESHARD"},
        notes=("bf16 gradients are reduced in fp32, where accelerate reduces them in bf16",)
        if precision == "bf16" and backend == "fsdp"
        else (),
    )


def _from_plugin(values: dict[str, Any], file: Path, precision: Precision) -> Configuration:
    """DeepSpeed through accelerate: the ds_config that it names, or the one that it makes of its own keys."""
    named = named_ds_config(values, file)
    if named is not None:
        made = from_ds_config(read_json(named, "a ds_config"), f"{file} ({named.name})")
        if "mixed_precision" in values:
            raise UserError(f"{file}: mixed_precision: accelerate refuses it beside {named.name}; remove it")
        return made
    return from_ds_config(plugin_config(values.get("deepspeed_config") or {}, precision), str(file))


def plugin_config(plugin: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """The ds_config that accelerate's DeepSpeedPlugin makes of an accelerate file's deepspeed_config."""

    def offload(name: str) -> dict[str, Any]:
        device = str(plugin.get(f"{name}_device", "none")).lower()
        return {"device": device, "nvme_path": plugin.get(f"{name}_nvme_path") if device == "nvme" else None}

    made: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", "auto"),
        "zero_optimization": {
            "stage": plugin.get("zero_stage", 2),
            "offload_optimizer": offload("offload_optimizer"),
            "offload_param": offload("offload_param"),
            "stage3_gather_16bit_weights_on_model_save": plugin.get("zero3_save_16bit_model", False),
        },
    }
    clip = plugin.get("gradient_clipping", "auto")
    if clip:
        made["gradient_clipping"] = clip
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    return made
