"""A configuration file as what it has a job compute: as the tools that it is written for would read it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.doctor import batches
from shardlab.doctor.configuration import Configuration
from shardlab.doctor.translate import plugin_config, read_configuration
from shardlab.doctor.translate_ds import from_ds_config
from shardlab.errors import UserError


def ds_config(**changes: Any) -> Configuration:
    return from_ds_config({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}} | changes, "ds.json")


def accelerate(directory: Path, **values: Any) -> Configuration:
    file = directory / "acc.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2} | values))
    return read_configuration(file)


def test_a_recipe_is_its_plan(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "train: {precision: fp32, clip_grad_norm: null, global_batch_size: 16}\n"
        "shard: {backend: zero3, recompute: selective}\n"
    )
    read = read_configuration(file)
    assert (read.kind, read.backend, read.precision, read.clip_grad_norm) == ("plan", "zero3", "fp32", None)
    assert (read.global_batch_size, read.recompute) == (16, "selective")
    assert str(read.settings["clipping"]) == "off (train.clip_grad_norm)"


def test_an_fsdp_file_does_not_clip(tmp_path: Path) -> None:
    read = accelerate(tmp_path, mixed_precision="bf16", fsdp_config={"fsdp_offload_params": True})
    assert (read.backend, read.precision, read.clip_grad_norm) == ("fsdp", "bf16", None)
    assert read.offload_parameters
    assert read.offload_optimizer
    assert read.recompute == "none"
    assert accelerate(tmp_path, fsdp_config={"fsdp_activation_checkpointing": True}).recompute == "full"
    assert not accelerate(tmp_path, fsdp_config={"fsdp_reshard_after_forward": False}).reshard_after_forward
    assert accelerate(tmp_path, fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"}).backend == "ddp"
    assert accelerate(tmp_path, distributed_type="MULTI_GPU").backend == "ddp"


def test_a_ds_config_without_clipping_clips_at_deepspeeds_default() -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8068"""
    read = ds_config()
    assert read.clip_grad_norm == 1.0
    assert read.settings["clipping"].origin == "DeepSpeed's default, for there is no gradient_clipping"
    assert read.ds_config is not None
    assert "gradient_clipping" not in read.ds_config  # so that DeepSpeed shows its own
    assert ds_config(gradient_clipping=0.0).clip_grad_norm is None
    assert ds_config(gradient_clipping="auto").clip_grad_norm == 1.0


def test_an_optimizer_left_to_the_program_is_no_part_of_it() -> None:
    read = ds_config(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    assert not read.own_optimizer
    assert any("optimizer" in note for note in read.notes)


def test_deepspeeds_adam_keeps_its_own_default_decay() -> None:
    """torch's is 0.01; DeepSpeed's is none."""
    read = ds_config(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    assert read.ds_config is not None
    assert read.ds_config["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}
    assert read.settings["optimizer"].value == "adamw lr 0.001 betas 0.9, 0.999 eps 1e-08 weight_decay 0.0"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "zero_optimization.sub_group_size"),
        ({"steps_per_print": "auto"}, "steps_per_print"),
        ({"train_micro_batch_size_per_gpu": "8"}, "train_micro_batch_size_per_gpu"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"optimizer": {"type": "Lion", "params": {}}}, "optimizer.type"),
    ],
)
def test_what_a_ds_config_has_that_can_not_be_run_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        ds_config(**values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision"),
        ({"parallelism_config": {"tp_size": 2}}, "parallelism_config"),
        ({"dynamo_config": {"dynamo_backend": "inductor"}}, "dynamo_config"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "hybrid"),
        ({"fsdp_config": {"fsdp_ignored_modules": "x"}}, "fsdp_ignored_modules"),
        ({"distributed_type": "XLA"}, "distributed_type"),
    ],
)
def test_what_an_accelerate_file_has_that_can_not_be_run_is_named(
    values: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key):
        accelerate(tmp_path, **values)


@pytest.mark.parametrize(
    "plugin",
    [
        {},
        {"zero_stage": 3, "offload_param_device": "cpu", "gradient_accumulation_steps": 4},
        {"zero_stage": 2, "gradient_clipping": 0.5, "offload_optimizer_device": "cpu", "zero3_save_16bit_model": True},
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accelerates_own_keys_become_the_ds_config_that_accelerate_makes(
    plugin: dict[str, Any], precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import DeepSpeedPlugin

    theirs = DeepSpeedPlugin(**plugin)
    theirs.set_mixed_precision("no" if precision == "fp32" else precision)
    expected = theirs.deepspeed_config
    del expected["steps_per_print"], expected["fp16"]
    if precision == "fp32":
        del expected["bf16"]
    assert json.loads(json.dumps(plugin_config(plugin, precision))) == expected


# Sequences per step.


def side(**changes: Any) -> Configuration:
    return Configuration(**({"file": "x", "kind": "plan", "precision": "fp32"} | changes))


def test_one_side_that_says_its_batch_gives_it_to_the_other() -> None:
    a, b = side(micro_batch=2, accumulation=2, global_batch_size=8), side()
    assert batches.difference(a, b) is None
    a, b = batches.agree(a, b)
    assert (b.micro_batch, b.accumulation, b.global_batch_size) == (2, 2, 8)
    a, b = batches.agree(side(), side())
    assert a.global_batch_size == b.global_batch_size


def test_a_micro_batch_alone_is_any_number_of_ranks() -> None:
    """4 on each of 8 ranks are the other's 32 sequences: two ranks stand for the eight."""
    a, b = side(micro_batch=4, accumulation=1), side(micro_batch=2, accumulation=8, global_batch_size=32)
    assert batches.difference(a, b) is None
    a, b = batches.agree(a, b)
    assert a.global_batch_size == b.global_batch_size
    assert a.micro_batch == 4


def test_different_batches_are_a_difference() -> None:
    assert "8 sequences" in str(batches.difference(side(global_batch_size=8), side(global_batch_size=16)))
    assert "a multiple of 6" in str(batches.difference(side(global_batch_size=8), side(micro_batch=3, accumulation=2)))
    assert "on each rank" in str(
        batches.difference(side(micro_batch=3, accumulation=2), side(micro_batch=2, accumulation=2))
    )


def test_a_long_accumulation_is_shortened_alike() -> None:
    a, b = batches.agree(
        side(micro_batch=1, accumulation=256, global_batch_size=512), side(micro_batch=4, accumulation=64)
    )
    assert a.global_batch_size == b.global_batch_size == 32


def test_what_two_ranks_can_not_share_is_said() -> None:
    with pytest.raises(UserError, match="7 sequences per step can't be shared out to 2 ranks"):
        batches.agree(side(global_batch_size=7), side())
