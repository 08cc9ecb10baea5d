"""Accelerate files: keys that nobody reads, jobs that become one process, and quarrels with a ds_config."""

from typing import Any

import pytest

from shardlab.planner.lint import Finding, lint_accelerate, lint_ds_config


def accelerate(**changes: Any) -> dict[str, Any]:
    """An accelerate file that nothing is to be said against."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "num_machines": 1,
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
    } | changes


def ds_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    } | changes


def fsdp(**config: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config}


def errors(values: dict[str, Any]) -> list[Finding]:
    return [one for one in lint_accelerate(values, "acc.yaml") if one.severity == "error"]


def together(ds: dict[str, Any], accelerate_values: dict[str, Any]) -> list[str]:
    found = lint_ds_config(ds, accelerate_values, file="ds.json", accelerate_file="acc.yaml")
    return [str(one) for one in found if one.severity == "error"]


def test_sound_files_get_no_more_than_their_batch() -> None:
    (note,) = lint_ds_config(ds_config(), accelerate(), file="ds.json", accelerate_file="acc.yaml")
    assert note.message == "a step is micro-batch 2 x accumulation 4 x 2 ranks = 16 sequences"
    assert errors(fsdp(fsdp_version=2, fsdp_offload_params=False, reshard_after_forward=True)) == []


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        (accelerate(num_proceses=2), "num_proceses", "num_processes"),
        (accelerate(mixed_precison="bf16"), "mixed_precison", "mixed_precision"),
        (accelerate(zero_stage=2), "zero_stage", "deepspeed_config.zero_stage"),
        (accelerate(fsdp_version=2), "fsdp_version", "fsdp_config.fsdp_version"),
        (accelerate(deepspeed_config={"zero_stag": 2}), "deepspeed_config.zero_stag", "zero_stage"),
        (fsdp(fsdp_ofload_params=True), "fsdp_config.fsdp_ofload_params", "fsdp_offload_params"),
        (fsdp(ofload_params=True), "fsdp_config.ofload_params", "fsdp_offload_params"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(values: dict[str, Any], key: str, nearest: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1809: within a section accelerate passes over it in silence."""
    (error,) = errors(values)
    assert error.key == key
    assert error.fix == f"did you mean {nearest}?"


@pytest.mark.parametrize("kind", ["MULTI_CPU", "NO"])
@pytest.mark.parametrize("use_cpu", [True, False])
def test_processes_that_become_one_in_silence(kind: str, use_cpu: bool) -> None:
    """https://github.com/huggingface/accelerate/issues/2741: two processes asked for, one started."""
    (error,) = errors({"distributed_type": kind, "num_processes": 2, "use_cpu": use_cpu})
    assert error.key == "num_processes"
    assert "starts ONE, without a word" in error.message
    assert errors({"distributed_type": kind, "num_processes": 1, "use_cpu": use_cpu}) == []


def test_mpirun_starts_what_is_asked_for() -> None:
    values = {"distributed_type": "MULTI_CPU", "num_processes": 2, "mpirun_config": {"mpirun_hostfile": "hosts"}}
    assert errors(values) == []


def test_two_precisions_name_both_files() -> None:
    """https://github.com/huggingface/accelerate/issues/3197"""
    (error,) = together(ds_config(fp16={"enabled": True}), accelerate(mixed_precision="bf16"))
    assert error.startswith("error: acc.yaml: mixed_precision: is bf16 here, and ds.json has fp16.enabled true")


def test_one_precision_in_both_files_is_refused_by_accelerate_too() -> None:
    (error,) = together(ds_config(bf16={"enabled": True}), accelerate(mixed_precision="bf16"))
    assert "accelerate refuses it beside a ds_config" in error


def test_a_batch_size_in_two_files_names_both_values() -> None:
    """https://github.com/modelscope/ms-swift/issues/9351"""
    plugin = {"deepspeed_config_file": "ds.json", "gradient_accumulation_steps": 8}
    (error,) = together(ds_config(), accelerate(deepspeed_config=plugin))
    assert error == (
        "error: acc.yaml: deepspeed_config.gradient_accumulation_steps: is 8 here and 4 in ds.json "
        "(gradient_accumulation_steps): accelerate refuses both at once; keep it in ds.json only"
    )


def test_ranks_come_from_the_accelerate_file() -> None:
    """https://github.com/CarperAI/trlx/issues/376"""
    (error,) = together(ds_config(train_batch_size=8), accelerate())
    assert "2 ranks (acc.yaml: num_processes) = 16" in error


def test_a_ds_config_that_is_not_read() -> None:
    (error,) = together(ds_config(), accelerate(distributed_type="MULTI_GPU", deepspeed_config={}))
    assert "so ds.json is not read" in error
    (error,) = together(ds_config(), accelerate(deepspeed_config={"deepspeed_config_file": "other.json"}))
    assert "names other.json, not ds.json" in error


@pytest.mark.parametrize("key", ["mixed_precision", "distributed_type"])
def test_a_bare_no_is_false_to_yaml(key: str) -> None:
    assert any(error.key == key and "quotes" in error.fix for error in errors(accelerate(**{key: False})))


def test_words_that_accelerate_does_not_know() -> None:
    (error,) = errors(accelerate(mixed_precision="bfloat16"))
    assert error.fix == "did you mean bf16?"
    (error,) = errors({"distributed_type": "DDP", "num_processes": 2})
    assert error.key == "distributed_type"


def test_offload_without_a_ds_config() -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/2971"""
    plugin = {"zero_stage": 2, "offload_param_device": "cpu"}
    (error,) = errors(accelerate(deepspeed_config=plugin))
    assert error.key == "deepspeed_config.offload_param_device"
    (error,) = errors(accelerate(deepspeed_config={"zero_stage": 3, "offload_param_device": "nvme"}))
    assert error.key == "deepspeed_config.offload_param_nvme_path"


def test_fsdp_on_a_cpu_becomes_ddp() -> None:
    (warning,) = lint_accelerate(fsdp() | {"use_cpu": True}, "acc.yaml")
    assert (warning.severity, warning.key) == ("warning", "use_cpu")


def test_a_ds_config_without_zero_is_refused_by_accelerate() -> None:
    values = ds_config()
    del values["zero_optimization"]
    (error,) = together(values, accelerate())
    assert error.startswith("error: ds.json: zero_optimization: missing")


def test_fsdp_loading_that_accelerate_refuses() -> None:
    (error,) = errors(fsdp(fsdp_sync_module_states=False))
    assert error.key == "fsdp_config.fsdp_sync_module_states"


def test_several_machines_need_a_first_one() -> None:
    keys = [error.key for error in errors(accelerate(num_machines=2, num_processes=3))]
    assert keys == ["num_processes", "main_process_ip", "main_process_port"]


def test_what_is_missing_is_named() -> None:
    assert [error.key for error in errors({"num_processes": 2})] == ["distributed_type"]
    assert [error.key for error in errors({"distributed_type": "FSDP"})] == ["num_processes"]
