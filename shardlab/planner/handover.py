"""`shardlab plan --emit DIR`: the files that start a plan under other programs.

A directory with a ds_config (ZeRO), an accelerate file, arguments for the HF Trainer, the recipe with the plan written
into it, and a README with one command for each launcher. Every value is a number: nothing is left "auto", so that the
job that runs is the one that was planned.

Paths inside the files start where the command is typed, as accelerate and DeepSpeed read them.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from shardlab.errors import UserError
from shardlab.plan import Plan
from shardlab.planner.emit import plan_config
from shardlab.planner.names import gib, name, settings
from shardlab.planner.search import Candidate, Survey
from shardlab.recipe import Recipe, dump_recipe

DS_CONFIG = "ds_config.json"
ACCELERATE = "accelerate.yaml"
TRAINER = "training_arguments.json"
RECIPE = "recipe.yaml"
README = "README.md"
FIRST_HOST, PORT = "FIRST-HOST", 29500  # of several: to be filled in
FILES = frozenset({DS_CONFIG, ACCELERATE, TRAINER, RECIPE, README})


def write_files(directory: Path, found: Survey) -> list[Path]:
    """Write the files of the survey's chosen plan; their paths.

    Files of an earlier call are replaced. Raises UserError where nothing fits, and where `directory` holds anything
    else.
    """
    candidate = chosen(found)
    _refuse_what_is_not_ours(directory)
    texts = {ACCELERATE: yaml.safe_dump(accelerate_config(candidate.plan, found, directory), sort_keys=False)}
    if candidate.plan.backend.startswith("zero"):
        sizes = [parameter.numel for parameter in found.shape.parameters]
        texts[DS_CONFIG] = plan_config(candidate.plan, sizes, accelerator=found.machine.accelerator)
    if trainer_takes(candidate.plan, found):
        texts[TRAINER] = json.dumps(trainer_arguments(candidate.plan, found, directory), indent=2) + "\n"
    if found.own is not None and found.loop == "shardlab":
        texts[RECIPE] = dump_recipe(planned_recipe(found.recipe, candidate.plan))
    texts[README] = _readme(candidate, found, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in FILES - texts.keys():
        (directory / stale).unlink(missing_ok=True)
    for file, text in texts.items():
        (directory / file).write_text(text, encoding="utf-8")
    return [directory / file for file in texts]


def chosen(found: Survey) -> Candidate:
    """The recipe's own plan where it names a backend, else the best that fits.

    Raises UserError where that does not fit, or is no other program's.
    """
    own = found.own
    if own is not None and found.recipe.shard.backend != "auto":
        if own.plan.backend == "stream":
            raise UserError("--emit: backend stream is shardlab's own, run it by `shardlab train`")
        if not own.fits:
            instead = f"; {settings(found.best.plan)} would fit" if found.best is not None else ""
            raise UserError(
                f"--emit: the recipe's own plan ({name(own.plan)}) is over by {gib(-own.left_bytes)} GiB{instead}"
            )
        return own
    best = next((candidate for candidate in found.fitting if _is_for_others(candidate.plan)), None)
    if best is None:
        raise UserError("--emit: no plan fits this machine; the table of `shardlab plan` says by how much")
    return best


def _is_for_others(plan: Plan) -> bool:
    """Other programs run all blocks again or none, and keep what blocks save where it is made."""
    return not plan.recompute_fits and plan.offload.activations == "none"


def _refuse_what_is_not_ours(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"--emit {directory}: is a file, not a directory")
    others = sorted(entry.name for entry in directory.iterdir() if entry.name not in FILES)
    if others:
        raise UserError(f"--emit {directory}: holds other files ({', '.join(others[:3])}); name another directory")


def planned_recipe(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with every `auto` of its shard section replaced by the plan's value."""
    shard = {
        **recipe.shard.model_dump(mode="json"),
        "backend": plan.backend,
        "micro_batch": plan.micro_batch,
        "world_size": plan.world_size,
        "recompute": plan.recompute,
        "offload": {"parameters": plan.offload.parameters, "optimizer": plan.offload.optimizer},
    }
    return Recipe.from_dict({**recipe.model_dump(mode="json"), "shard": shard})


def accelerate_config(plan: Plan, found: Survey, directory: Path) -> dict[str, Any]:
    """An accelerate file's values: that many processes, with the plan's sharding for a program of the user's own."""
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    zero = plan.backend.startswith("zero")
    if zero:
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {
            "deepspeed_config_file": (directory / DS_CONFIG).as_posix(),
            "zero3_init_flag": plan.backend == "zero3",
        }
    elif plan.backend == "fsdp":
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = _fsdp(plan, found.block_class)
        if plan.replicas > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": plan.replicas,
                "parallelism_config_dp_shard_size": plan.world_size // plan.replicas,
            }
    else:
        # On a CPU too: MULTI_CPU, or use_cpu: true, starts one process without a word.
        config["distributed_type"] = "MULTI_GPU" if plan.world_size > 1 else "NO"
    config |= {"num_machines": found.machine.nodes, "machine_rank": 0, "num_processes": plan.world_size}
    if found.machine.nodes > 1:
        config |= {"main_process_ip": FIRST_HOST, "main_process_port": PORT}
    config["use_cpu"] = plan.world_size == 1 and not zero and not found.machine.accelerator
    if not zero:  # with a ds_config the precision stands in it, and accelerate refuses it in both
        config["mixed_precision"] = "bf16" if _autocast(plan, found) else "no"
    return config


def _fsdp(plan: Plan, block_class: str) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": block_class,
        "fsdp_reshard_after_forward": plan.reshard_after_forward,
        "fsdp_offload_params": plan.offload.parameters == "cpu",
        "fsdp_activation_checkpointing": plan.recompute != "none",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _autocast(plan: Plan, found: Survey) -> bool:
    """Whether weights are fp32 and a loop other than ours casts as it computes."""
    return plan.precision == "bf16" and found.loop != "hf-bf16"


def trainer_takes(plan: Plan, found: Survey) -> bool:
    """Whether the HF Trainer runs the plan: without a GPU it refuses bf16 beside DeepSpeed."""
    return found.machine.accelerator or not (plan.backend.startswith("zero") and plan.precision == "bf16")


def trainer_arguments(plan: Plan, found: Survey, directory: Path) -> dict[str, Any]:
    """For `transformers.TrainingArguments(**values)`, beside what only the user knows."""
    zero = plan.backend.startswith("zero")
    recipe = found.recipe
    values: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "max_grad_norm": 0.0 if plan.clip_grad_norm is None else plan.clip_grad_norm,
        "bf16": _autocast(plan, found) or (zero and plan.precision == "bf16"),
        "learning_rate": recipe.train.optimizer.lr,
        "weight_decay": recipe.train.optimizer.weight_decay,
        "seed": plan.seed,
    }
    # With FSDP accelerate's file asks for it: the Trainer refuses both at once.
    if plan.recompute != "none" and plan.backend != "fsdp":
        values |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if zero:
        values["deepspeed"] = (directory / DS_CONFIG).as_posix()
    if not found.machine.accelerator:
        values |= {"accelerator_config": {"use_configured_state": True}} if zero else {"use_cpu": True}
    return values


def commands(found: Survey, plan: Plan, directory: Path) -> dict[str, list[str]]:
    """The launch lines, by whose loop runs; train.py stands for a script of the user's own."""
    ranks, file = plan.world_size, (directory / ACCELERATE).as_posix()
    recipe = (directory / RECIPE).as_posix()
    nodes = found.machine.nodes
    torchrun, deepspeed = f"torchrun --standalone --nproc-per-node {ranks}", f"deepspeed --num_gpus {ranks}"
    accelerate = f"accelerate launch --config_file {file}"
    if nodes > 1:
        torchrun = f"torchrun --nnodes {nodes} --node-rank 0 --nproc-per-node {ranks // nodes}"
        torchrun += f" --master-addr {FIRST_HOST} --master-port {PORT}"
        deepspeed, accelerate = "deepspeed --hostfile hostfile", f"{accelerate} --machine_rank 0"
    ours = []
    if found.own is not None and found.loop == "shardlab":
        train = f"train {recipe} --output runs/planned"
        ours = [f"shardlab train {recipe} --nproc {ranks}"] if nodes == 1 else []
        ours += [f"{accelerate} -m shardlab {train}", f"{torchrun} -m shardlab {train}"]
        ours += [f"{deepspeed} --module shardlab {train}"]
    # glibc's defaults hold memory that no tensor uses any more; ours sets the same for itself.
    malloc = "" if found.machine.accelerator else "MALLOC_MMAP_THRESHOLD_=262144 MALLOC_ARENA_MAX=2 "
    theirs = [f"{malloc}{accelerate} train.py"]
    if plan.backend.startswith("zero"):
        config = (directory / DS_CONFIG).as_posix()
        theirs.append(f"{malloc}{deepspeed} train.py --deepspeed --deepspeed_config {config}")
    if plan.backend != "fsdp":
        theirs.append(f"{malloc}{torchrun} train.py")
    return {"shardlab's loop": ours, "a script of your own, or the HF Trainer": theirs}


def _readme(candidate: Candidate, found: Survey, directory: Path) -> str:
    plan, footprint = candidate.plan, candidate.footprint
    low, high = footprint.surely + footprint.libraries, footprint.highest + footprint.libraries
    lines = [
        f"# {name(plan)}, {plan.precision}, {plan.world_size} x {found.machine.name}",
        "",
        f"micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size} ranks = "
        f"{plan.global_batch_size} sequences of {found.recipe.data.sequence_length} tokens in a step.",
        f"Predicted peak of a rank: {gib(low)} to {gib(high)} GiB of {gib(found.machine.memory_bytes)}, in the "
        f"{footprint.where}, for {LOOPS[found.loop]}.",
        *_other_loop(found),
        "",
        "Paths start at the directory that `shardlab plan` was called in: type these there.",
    ]
    for loop, launches in commands(found, plan, directory).items():
        if launches:
            lines += ["", f"## With {loop}", "", "```bash", *launches, "```"]
    lines += ["", "## In a script of your own", "", *_script_notes(plan, found, directory)]
    return "\n".join(lines) + "\n"


LOOPS = {
    "shardlab": "shardlab's own loop",
    "hf": "a plain Hugging Face loop, autocast where the precision is bf16, torch's AdamW as it comes",
    "hf-bf16": "a plain Hugging Face loop on weights in bf16, torch's AdamW as it comes",
}


def _other_loop(found: Survey) -> list[str]:
    if found.loop != "shardlab":
        return []
    return ["A loop that keeps the logits whole takes more: `shardlab plan … --loop hf` plans that one."]


def _script_notes(plan: Plan, found: Survey, directory: Path) -> list[str]:
    zero = plan.backend.startswith("zero")
    file = (directory / TRAINER).as_posix()
    lines = [
        f"- HF Trainer: `TrainingArguments(output_dir=..., **json.load(open('{file}')))`."
        if trainer_takes(plan, found)
        else "- HF Trainer: without a GPU it refuses bf16 beside DeepSpeed; plan with `--set train.precision=fp32`.",
        f"- Accelerate: a loader of {plan.micro_batch} sequences a rank, and "
        f"`Accelerator(gradient_accumulation_steps={plan.accumulation})`.",
    ]
    if plan.recompute == "selective":
        lines.append(
            "- Selective recompute is shardlab's: other programs have none or all of it. The files ask for all, which "
            "takes less memory than planned, and more time."
        )
    if plan.recompute != "none" and plan.backend != "fsdp":
        lines.append("- `model.gradient_checkpointing_enable()`: the plan recomputes.")
    if found.loop == "hf-bf16":
        lines.append("- `from_pretrained(..., dtype=torch.bfloat16)`: the plan computes on weights in bf16.")
    if not found.machine.accelerator and zero:
        lines.append(
            "- Without a GPU: `Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')])`, else every rank "
            "takes itself for the only one; with the Trainer, before anything else, "
            "`os.environ['ACCELERATE_USE_DEEPSPEED'] = 'true'` and `PartialState(backend='gloo')`."
        )
    elif not found.machine.accelerator and plan.backend == "fsdp":
        lines.append(
            "- Without a GPU Accelerate turns FSDP into DDP, without a word: shardlab's loop is the one that shards."
        )
    elif not found.machine.accelerator:
        lines.append("- Without a GPU: `Accelerator(cpu=True)`.")
    if found.machine.nodes > 1:
        lines.append(
            f"- {found.machine.nodes} hosts: {FIRST_HOST} is to be filled in, also in `{ACCELERATE}`; with accelerate "
            "and torchrun each host is started with its own rank."
        )
    return lines
