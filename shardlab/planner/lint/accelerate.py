"""An accelerate config file: keys that nobody reads, jobs that become one process, quarrels with a ds_config."""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, described, is_number, section
from shardlab.planner.lint.offload import lint_offload
from shardlab.planner.lint.precision import precision_of
from shardlab.planner.lint.schema import accelerate_distributed_types, accelerate_keys

_PLUGIN = "deepspeed_config"
_FILE = f"{_PLUGIN}.deepspeed_config_file"
# Keys of its deepspeed_config, which accelerate refuses beside a ds_config, and what they are called in one.
_TWICE = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}
# Sections that count for one distributed_type only.
_SECTION_OF = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
_ONLY_FSDP_1 = ("fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_backward_prefetch", "fsdp_sync_module_states")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def lint_accelerate(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """Findings on an accelerate file by itself."""
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield Finding("note", file, "compute_environment", "only LOCAL_MACHINE is checked")
        return
    yield from _keys(values, file)
    yield from _words(values, file)
    yield from _processes(values, file)
    yield from _fsdp(values, file)
    yield from _plugin(values, file)
    kind = values.get("distributed_type")
    for name, needed in _SECTION_OF.items():
        if values.get(name) and kind not in (None, needed):
            yield Finding("warning", file, name, f"not read: distributed_type is {kind}, not {needed}")


def _keys(values: dict[str, Any], file: str) -> Iterator[Finding]:
    known = accelerate_keys()
    for key in values:
        if known and key not in known[""]:
            elsewhere = [name for name in known if key in known[name] or f"fsdp_{key}" in known[name]]
            near = [f"{elsewhere[0]}.{key}"] if elsewhere else get_close_matches(key, known[""], n=1)
            fix = f"did you mean {near[0]}?" if near else "remove it"
            yield Finding("error", file, key, "unknown key, which accelerate refuses", fix)
    for name, inner in known.items():
        prefix = "" if name in ("", "deepspeed_config", "parallelism_config") else name.removesuffix("config")
        for key in section(values, name) if name else ():
            if key not in inner and prefix + key not in inner:
                near = get_close_matches(key if key.startswith(prefix) else prefix + key, inner, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(inner))}"
                yield Finding(
                    "error", file, f"{name}.{key}", "unknown key, which accelerate passes over in silence", fix
                )


def _words(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """Values that are one of several words. YAML reads a bare `no` as false."""
    choices = {"distributed_type": accelerate_distributed_types(), "mixed_precision": _PRECISIONS}
    for key, words in choices.items():
        value = values.get(key)
        if value is False:
            word = "NO" if key == "distributed_type" else "no"
            message = f"YAML reads a bare {word} as false, on which accelerate fails"
            yield Finding("error", file, key, message, f"write '{word}' with its quotes")
        elif value is not None and words and str(value) not in words:
            near = get_close_matches(str(value), words, n=1, cutoff=0.4)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(words)}"
            yield Finding("error", file, key, f"{described(value)} is not one of accelerate's", fix)
    if "distributed_type" not in values:
        yield Finding("error", file, "distributed_type", "missing, and accelerate refuses the file", "give one")
    if values.get("mixed_precision") == "fp16" and values.get("use_cpu") is True:
        yield Finding("error", file, "mixed_precision", "fp16 needs a GPU, and use_cpu is true", "use bf16")


def _processes(values: dict[str, Any], file: str) -> Iterator[Finding]:
    kind, count, machines = (values.get(key) for key in ("distributed_type", "num_processes", "num_machines"))
    if count is None:
        if kind not in (None, False, "NO"):
            yield Finding(
                "error", file, "num_processes", "missing: accelerate asks for --num_processes then", "give one"
            )
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        yield Finding("error", file, "num_processes", f"expected an integer of at least 1, got {described(count)}")
        return
    hostfile = section(values, "mpirun_config").get("mpirun_hostfile") or values.get("mpirun_hostfile")
    if count > 1 and kind in ("MULTI_CPU", "NO", False) and not hostfile:
        cpu = " with use_cpu: true" if values.get("use_cpu") is True else ""
        yield Finding(
            "error",
            file,
            "num_processes",
            f"{count} processes are asked for, and distributed_type {kind or 'NO'}{cpu} starts ONE, without a word",
            "use distributed_type: MULTI_GPU and use_cpu: false, with Accelerator(cpu=True) where there is no GPU "
            "(or shardlab's --nproc, or torchrun)",
        )
    if isinstance(machines, int) and machines > 1:
        if count % machines:
            yield Finding("error", file, "num_processes", f"{count} does not divide over num_machines {machines}")
        for key in ("main_process_ip", "main_process_port"):
            if values.get(key) is None:
                yield Finding("error", file, key, f"missing, and num_machines is {machines}", "name the first host")


def _fsdp(values: dict[str, Any], file: str) -> Iterator[Finding]:
    if values.get("distributed_type") != "FSDP":
        return
    given = {
        key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in section(values, "fsdp_config").items()
    }
    version = str(given.get("fsdp_version", 1))
    if version == "2":
        for key in _ONLY_FSDP_1:
            if key in given:
                yield Finding("note", file, f"fsdp_config.{key}", "does nothing in fsdp_version 2")
    loads = str(given.get("fsdp_cpu_ram_efficient_loading", True)).lower() == "true"
    if loads and str(given.get("fsdp_sync_module_states", True)).lower() == "false":
        yield Finding(
            "error",
            file,
            "fsdp_config.fsdp_sync_module_states",
            "false, and accelerate refuses that together with fsdp_cpu_ram_efficient_loading",
            "set it to true",
        )
    if values.get("use_cpu") is True:
        yield Finding(
            "warning",
            file,
            "use_cpu",
            "with Accelerator(cpu=True) accelerate turns FSDP into DDP, without a word",
            "use shardlab's fsdp backend on a CPU",
        )


def _plugin(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """The offload that a deepspeed_config without a ds_config asks for."""
    plugin = section(values, _PLUGIN)
    if values.get("distributed_type") != "DEEPSPEED" or plugin.get("deepspeed_config_file") is not None:
        return
    made: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        if f"{name}_device" in plugin:
            made[name] = {
                "device": str(plugin[f"{name}_device"]).lower(),
                "nvme_path": plugin.get(f"{name}_nvme_path"),
            }
    # accelerate brings the optimizer that goes with an offload.
    config = {"zero_optimization": made, "zero_force_ds_cpu_optimizer": False}
    for finding in lint_offload(config, file, None, Path()):
        section_of, _, leaf = finding.key.removeprefix("zero_optimization.").partition(".")
        fix = finding.fix.replace("zero_optimization.stage", "zero_stage")
        yield replace(finding, key=f"{_PLUGIN}.{section_of}_{leaf}", fix=fix)


def lint_together(
    values: dict[str, Any], file: str, accelerate: dict[str, Any], accelerate_file: str
) -> Iterator[Finding]:
    """Findings on a ds_config and the accelerate file that is used with it."""
    plugin = section(accelerate, _PLUGIN)
    kind = accelerate.get("distributed_type")
    if kind != "DEEPSPEED":
        message = f"{kind}: DeepSpeed is not used, so {file} is not read"
        yield Finding("error", accelerate_file, "distributed_type", message, "write DEEPSPEED")
        return
    named = plugin.get("deepspeed_config_file")
    if "zero_optimization" not in values:
        yield Finding("error", file, "zero_optimization", "missing, and accelerate refuses that", 'write {"stage": 0}')
    if named is None:
        message = f"missing: accelerate makes a config of its own then, and {file} is not read"
        yield Finding("warning", accelerate_file, _FILE, message, f"name {file} there, or hand it to the HF Trainer")
    elif Path(str(named)).name != Path(file).name:
        yield Finding("error", accelerate_file, _FILE, f"names {named}, not {file}", f"write {file}")
    for key, path in _TWICE.items():
        if key in plugin:
            yield _twice(f"{_PLUGIN}.{key}", plugin[key], path, values, file, accelerate_file)
    if "mixed_precision" in accelerate:
        yield from _precision(accelerate["mixed_precision"], values, file, accelerate_file)


def _twice(
    key: str, value: Any, path: tuple[str, ...], values: dict[str, Any], file: str, accelerate_file: str
) -> Finding:
    theirs: Any = values
    for name in path:
        theirs = theirs.get(name) if isinstance(theirs, dict) else None
    where = f"{file} ({'.'.join(path)})"
    if theirs is None:
        said = f"is {described(value)} here and nothing in {where}"
    elif theirs in (value, AUTO):
        said = f"is {described(value)} here, beside {described(theirs)} in {where}"
    else:
        said = f"is {described(value)} here and {described(theirs)} in {where}"
    fix = f"keep it in {file} only" if theirs not in (None, AUTO) else f"write it in {file} only"
    return Finding("error", accelerate_file, key, f"{said}: accelerate refuses both at once", fix)


def _precision(value: Any, values: dict[str, Any], file: str, accelerate_file: str) -> Iterator[Finding]:
    theirs = precision_of(values)
    ours = "no" if value is False else str(value)
    where = f"{file} has {'no precision' if theirs == 'no' else f'{theirs}.enabled true'}"
    if theirs == AUTO:
        where = f"{file} leaves it to auto"
    quarrel = ours != theirs and theirs != AUTO
    message = f"is {ours} here, and {where}: " + (
        "the two say different things" if quarrel else "accelerate refuses it beside a ds_config, whichever it is"
    )
    fix = f"remove it here, and write the precision in {file}"
    yield Finding("error", accelerate_file, "mixed_precision", message, fix)


def ranks_of(accelerate: dict[str, Any] | None) -> int | None:
    """The number of processes that an accelerate file asks for, None where it does not say."""
    count = None if accelerate is None else accelerate.get("num_processes")
    return int(count) if is_number(count) and count >= 1 else None
