"""`shardlab plan --emit DIR`: files that the linter, DeepSpeed, accelerate and the HF Trainer take, and that run."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import TrainingArguments
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.plan import BackendName, Footprint, Loop, ModelShape, Offload, ParameterShape, Plan
from shardlab.planner import resolve
from shardlab.planner.handover import write_files
from shardlab.planner.lint import lint_ds_config
from shardlab.planner.lint.accelerate import lint_accelerate
from shardlab.planner.machine import GIB, Machine
from shardlab.planner.search import BACKENDS, Candidate, Survey
from shardlab.recipe import Recipe, load_recipe
from tests.train.support import REPOSITORY, free_port, shardlab, write_recipe

PROGRAM = Path(__file__).with_name("programs") / "planned.py"
SHAPE = ModelShape((ParameterShape("embedding", (64, 32), True, 2), ParameterShape("block", (99,), True, 1)), 1, False)
FOOTPRINT = Footprint("forward pass of block 1 of 2", {"parameters": 10}, {}, 10, 10, 11, 12, 100, 0)


def found(
    backend: BackendName,
    *,
    machine: Machine | None = None,
    own: bool = False,
    left: int = 1,
    loop: Loop = "shardlab",
    **changes: Any,
) -> Survey:
    """A survey of one plan, which the recipe names itself where `own`."""
    machine = machine or Machine("8xTEST", 2, True, GIB, GIB)
    plan = replace(Plan(backend, machine.ranks, 2, 3, 6 * machine.ranks, "bf16"), **changes)
    candidate = Candidate(plan, FOOTPRINT, left)
    shard = {"backend": backend} if own else {}
    recipe = Recipe.from_dict({"train": {"global_batch_size": plan.global_batch_size}, "shard": shard})
    return Survey(machine, recipe, SHAPE, "LlamaDecoderLayer", candidate, (candidate,), loop)


CASES = [
    pytest.param("ddp", {}, id="ddp"),
    pytest.param("ddp", {"recompute": "full", "precision": "fp32"}, id="ddp-recompute-fp32"),
    pytest.param("fsdp", {"recompute": "full", "replicas": 2, "world_size": 4}, id="hsdp-recompute"),
    pytest.param("ddp", {"recompute": "selective"}, id="ddp-selective"),
    pytest.param("fsdp", {"recompute": "selective"}, id="fsdp-selective"),
    pytest.param("fsdp", {"offload": Offload("cpu", "cpu")}, id="fsdp-offload"),
    pytest.param("zero1", {"precision": "fp32"}, id="zero1-fp32"),
    pytest.param("zero2", {"offload": Offload("none", "cpu"), "clip_grad_norm": None}, id="zero2-offload"),
    pytest.param("zero3", {"offload": Offload("cpu", "cpu"), "recompute": "full"}, id="zero3-offload"),
]


@pytest.mark.parametrize("accelerator", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize(("backend", "changes"), CASES)
def test_the_files_are_taken_by_the_linter_and_by_those_who_read_them(
    backend: BackendName, changes: dict[str, Any], accelerator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/transformers/issues/21342: nothing is "auto", nothing stands in two files."""
    ranks = changes.get("world_size", 2)
    survey = found(backend, machine=Machine("test", ranks, accelerator, GIB, GIB), **changes)
    monkeypatch.chdir(tmp_path)
    written = {path.name for path in write_files(Path("planned"), survey)}
    assert written >= {"accelerate.yaml", "README.md", "recipe.yaml"}
    values = yaml.safe_load(Path("planned/accelerate.yaml").read_text())
    config: Any = load_config_from_file("planned/accelerate.yaml")
    assert config.num_processes == ranks
    assert not config.use_cpu, "with it accelerate starts one process in silence"
    assert [str(one) for one in lint_accelerate(values, "accelerate.yaml")] == []
    assert ("ds_config.json" in written) == backend.startswith("zero")
    if backend.startswith("zero"):
        ds = json.loads(Path("planned/ds_config.json").read_text())
        findings = lint_ds_config(ds, values, ranks=ranks, file="planned/ds_config.json")
        assert [str(one) for one in findings if "a step is micro-batch" not in one.message] == []
        assert "auto" not in json.dumps(ds)
        monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)  # no job runs here to ask
        monkeypatch.setattr("deepspeed.runtime.config.dist.get_world_size", lambda: ranks)
        read = DeepSpeedConfig(config.deepspeed_config["deepspeed_config_file"])
        assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 3)
        assert read.zero_config.stage == int(backend[-1])
        assert read.gradient_clipping == (0.0 if "clip_grad_norm" in changes else 1.0)


@pytest.mark.parametrize(("backend", "changes"), [case for case in CASES if case.values[0] != "fsdp"])
def test_the_trainers_arguments_are_its_own(backend: BackendName, changes: dict[str, Any], tmp_path: Path) -> None:
    write_files(tmp_path / "planned", found(backend, machine=Machine("test", 2, False, GIB, GIB), **changes))
    if backend in ("zero2", "zero3"):  # bf16 beside DeepSpeed: it would say that it needs a GPU
        assert not (tmp_path / "planned/training_arguments.json").exists()
        assert "refuses bf16 beside DeepSpeed" in (tmp_path / "planned/README.md").read_text()
        return
    values = json.loads((tmp_path / "planned/training_arguments.json").read_text())
    values.pop("deepspeed", None)  # needs the job's ranks: see the test that runs it
    arguments = TrainingArguments(output_dir=str(tmp_path), **values)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 3)
    assert arguments.max_grad_norm == (0.0 if "clip_grad_norm" in changes else 1.0)
    assert arguments.gradient_checkpointing == (changes.get("recompute", "none") != "none")
    assert arguments.bf16 == (changes.get("precision") != "fp32")


def test_the_recipe_is_the_plan(tmp_path: Path) -> None:
    survey = found("zero2", recompute="full")
    write_files(tmp_path / "planned", survey)
    recipe = load_recipe(tmp_path / "planned/recipe.yaml")
    assert replace(resolve(recipe, world_size=2), reasons=()) == survey.candidates[0].plan
    with pytest.raises(UserError, match="this job has 4 ranks"):
        resolve(recipe, world_size=4)


def test_a_plain_loops_files_say_what_it_has_to_do(tmp_path: Path) -> None:
    written = write_files(tmp_path / "planned", found("ddp", loop="hf-bf16", recompute="full"))
    assert "recipe.yaml" not in {path.name for path in written}, "our loop is not the one that was planned"
    readme = (tmp_path / "planned/README.md").read_text()
    assert "dtype=torch.bfloat16" in readme
    assert "gradient_checkpointing_enable" in readme
    assert "shardlab train" not in readme
    assert yaml.safe_load((tmp_path / "planned/accelerate.yaml").read_text())["mixed_precision"] == "no"


def test_what_other_programs_have_not_is_said(tmp_path: Path) -> None:
    """Selective recompute: they get all of it, which fits where it does, and are told."""
    write_files(tmp_path / "planned", found("fsdp", recompute="selective"))
    config = yaml.safe_load((tmp_path / "planned/accelerate.yaml").read_text())
    assert config["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert "Selective recompute is shardlab's" in (tmp_path / "planned/README.md").read_text()
    assert load_recipe(tmp_path / "planned/recipe.yaml").shard.recompute == "selective"


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    write_files(tmp_path, found("zero1"))
    write_files(tmp_path, found("ddp"))
    assert not (tmp_path / "ds_config.json").exists(), "of the plan before"
    (tmp_path / "train.py").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"holds other files \(train.py\)"):
        write_files(tmp_path, found("zero1"))
    with pytest.raises(UserError, match="is a file"):
        write_files(tmp_path / "train.py", found("zero1"))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_several_hosts_are_named_in_the_files(tmp_path: Path) -> None:
    write_files(tmp_path / "planned", found("zero2", machine=Machine("2x8xTEST", 16, True, GIB, GIB, nodes=2)))
    values = yaml.safe_load((tmp_path / "planned/accelerate.yaml").read_text())
    assert (values["num_machines"], values["num_processes"], values["main_process_port"]) == (2, 16, 29500)
    assert [str(one) for one in lint_accelerate(values, "accelerate.yaml")] == []
    lines = commands(tmp_path / "planned")
    assert not any(line.startswith("shardlab") for line in lines), "it starts the ranks of one host"
    assert any("--nnodes 2 --node-rank 0 --nproc-per-node 8" in line for line in lines)


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no plan fits this machine"):
        write_files(tmp_path / "planned", found("ddp", left=-GIB))
    with pytest.raises(UserError, match=r"own plan \(ddp, micro-batch 2\) is over by 1.00 GiB$"):
        write_files(tmp_path / "planned", found("ddp", left=-GIB, own=True))
    assert not (tmp_path / "planned").exists()


@pytest.mark.slow
def test_the_command_takes_the_backend_that_the_recipe_names(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    for override, backend in ((["--set", "shard.backend=zero1"], "zero1"), ([], None)):
        asked = ["plan", str(recipe), "--nproc", "2", "--emit", str(tmp_path / "planned"), *override]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 0, done.output
        assert "written: " in done.output
        best = re.search(r"that fits: (\w+)", done.output)
        assert best is not None
        planned = load_recipe(tmp_path / "planned/recipe.yaml").shard
        assert planned.backend == (backend or best[1])
        assert planned.world_size == 2


def commands(directory: Path) -> list[str]:
    """The launch lines of a README."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (directory / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def start(command: str, directory: Path) -> None:
    """Type a launch line of the README in `directory`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "how"), [("zero2", ""), ("zero3", ""), ("zero1", "trainer"), ("ddp", ""), ("ddp", "trainer")]
)
def test_accelerate_launch_runs_a_users_script_with_the_files(backend: BackendName, how: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/2741: two ranks were asked for, and one ran."""
    survey = found(backend, machine=Machine("test", 2, False, GIB, GIB), precision="fp32", loop="hf")
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        write_files(Path("planned"), survey)
    finally:
        os.chdir(here)
    (line,) = (line for line in commands(tmp_path / "planned") if "accelerate launch" in line)
    script = f"{PROGRAM} planned {tmp_path / 'done.json'} {how}"
    start(line.replace("--config_file", "--main_process_port 0 --config_file").replace("train.py", script), tmp_path)
    result = json.loads((tmp_path / "done.json").read_text())
    assert result["world_size"] == 2
    assert [math.isclose(float(loss), math.log(64), rel_tol=0.1) for loss in result["losses"]] == [True, True]
    if backend == "ddp":
        assert result["wrapped"] == "DistributedDataParallel"
    else:
        assert (result["stage"], result["micro_batch"]) == (int(backend[-1]), 2)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with planned/, as the command writes it."""
    directory = tmp_path_factory.mktemp("emitted")
    asked = ["--nproc", "2", "--set", "shard.backend=zero1", "--emit", directory / "planned"]
    done = shardlab("plan", write_recipe(directory), *asked)
    assert done.code == 0, done.err
    return directory


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["shardlab", "accelerate", "torchrun", "deepspeed"])
def test_each_launch_line_runs_our_own_loop(launcher: str, emitted: Path, tmp_path: Path) -> None:
    (line,) = (line for line in commands(emitted / "planned") if line.startswith(launcher) and "shardlab" in line)
    line = line.replace("runs/planned", str(tmp_path / "run"))
    line += "" if "--output" in line else f" --output {tmp_path / 'run'}"
    line = line.replace("deepspeed ", f"deepspeed --master_port {free_port()} ", 1) if launcher == "deepspeed" else line
    start(line, emitted)
    ran = json.loads((tmp_path / "run/plan.json").read_text())
    assert (ran["backend"], ran["world_size"]) == ("zero1", 2)


def test_every_backend_has_its_files(tmp_path: Path) -> None:
    for backend in BACKENDS:
        assert write_files(tmp_path / backend, found(backend))
    assert shardlab("plan", "--loop", "mine").code == 2
