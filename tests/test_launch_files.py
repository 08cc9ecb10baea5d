"""The files in launch/: each one is run on two CPU ranks, or rendered and validated."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.support import free_port

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
ACCELERATE = sorted((LAUNCH / "accelerate").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Two steps of the smallest model on a text of its own."""
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)), encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    values = {
        "model": {"preset": "tiny"},
        "data": {"files": ["text.txt"], "tokenizer": "bytes", "sequence_length": 32},
        "train": {"steps": 2, "global_batch_size": 4, "precision": "fp32"},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run(command: list[str], tmp_path: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SHARDLAB_CACHE": str(tmp_path / "cache"),
        **extra,
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda file: file.stem)
def test_accelerate_reads_the_file_and_means_several_processes(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config: Any = load_config_from_file(str(file))
    assert config.num_processes >= 2
    assert not config.use_cpu, "with it accelerate starts one process in silence"
    assert "CPU" not in str(config.distributed_type)
    if file.stem.startswith("zero"):
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2"])
def test_the_cpu_files_start_two_ranks_of_our_program(backend: str, recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    file = LAUNCH / "accelerate" / f"{backend}_cpu.yaml"
    command = ["accelerate", "launch", "--config_file", str(file), "--main_process_port", "0", "-m", "shardlab"]
    override = [f"--set=shard.backend={backend}", "--set=shard.world_size=2"]
    done = run([*command, "train", str(recipe), "--output", str(output), *override], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "plan.json").read_text())["world_size"] == 2
    assert len(losses(output)) == 2


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_torchrun_sh_starts_the_ranks_of_one_host(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = ["bash", str(LAUNCH / "torchrun.sh"), str(recipe), "--output", str(output)]
    done = run(script, tmp_path, RANKS_PER_NODE="2", MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "plan.json").read_text())["world_size"] == 2


def test_the_slurm_script_gives_each_node_its_rank(tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands: srun runs the task for both nodes, torchrun prints its arguments."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in {
        "scontrol": "printf 'host-a\\nhost-b\\n'",
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "torchrun": 'echo "$@"',
    }.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    done = run(["bash", str(LAUNCH / "slurm.sbatch"), "r.yaml", "--output", "runs/a"], tmp_path, PATH=path, **slurm)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [f"--node_rank {rank}" in line for rank, line in enumerate(lines)] == [True, True]
    for line in lines:
        assert "--nnodes 2" in line
        assert "--nproc_per_node 4 --master_addr host-a" in line
        assert line.endswith("-m shardlab train r.yaml --output runs/a --set shard.world_size=8")


def test_the_kubernetes_job_finds_its_first_pod() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    # An indexed job's pods are named JOB-INDEX, and resolve as that under the headless service that is their subdomain.
    assert pod["subdomain"] == service["metadata"]["name"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert environment["MASTER_ADDR"]["value"] == first
    assert environment["NODES"]["value"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert int(environment["RANKS_PER_NODE"]["value"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert (ROOT / container["command"][1]).is_file()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_deepspeed_reads_the_hostfile() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(LAUNCH / "hostfile.example"))) == {"host-a": 8, "host-b": 8}


def test_the_shell_scripts_parse() -> None:
    for script in ("torchrun.sh", "slurm.sbatch"):
        subprocess.run([shutil.which("bash") or "bash", "-n", str(LAUNCH / script)], check=True)
