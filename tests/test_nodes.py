"""Two hosts for real: network namespaces joined by a virtual cable, each with its own launcher."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces alone
PORT = "29577"
CABLE = "cable0"  # the interface in each of them


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces; interface `CABLE` in each. Skips where this process may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` (iproute2), which makes the namespaces")
    names = (f"shardlab-a-{os.getpid()}", f"shardlab-b-{os.getpid()}")
    a, b = names
    commands = [["netns", "add", a], ["netns", "add", b]]
    commands += [["link", "add", CABLE, "netns", a, "type", "veth", "peer", "name", CABLE, "netns", b]]
    for name, address in zip(names, ADDRESSES, strict=True):
        commands += [["-n", name, "addr", "add", f"{address}/24", "dev", CABLE]]
        commands += [["-n", name, "link", "set", device, "up"] for device in (CABLE, "lo")]
    try:
        for command in commands:
            made = subprocess.run(["ip", *command], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)), encoding="utf-8")
    values = {
        "model": {"preset": "tiny"},
        "data": {"files": ["text.txt"], "tokenizer": "bytes", "sequence_length": 32},
        "train": {"steps": 3, "global_batch_size": 4, "precision": "fp32", "schedule": {"warmup_steps": 1}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class Job:
    """The same command on each host, with its own rank of the host."""

    def __init__(self, hosts: tuple[str, str], tmp_path: Path, commands: list[list[str]]):
        self.logs = [tmp_path / f"{host}.log" for host in hosts]
        environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": CABLE,
            "SHARDLAB_CACHE": str(tmp_path / "cache"),
        }
        self.processes = []
        for host, log, command in zip(hosts, self.logs, commands, strict=True):
            with log.open("w") as stream:
                started = subprocess.Popen(
                    ["ip", "netns", "exec", host, *command],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self.processes.append(started)

    def wait(self, seconds: float) -> list[int | None]:
        """Exit status of each host's launcher; None where it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def torchrun(node: int, arguments: list[str], ranks: int = 1) -> list[str]:
    return [
        *("torchrun", "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", str(ranks)),
        *("--master_addr", ADDRESSES[0], "--master_port", PORT, "-m", "shardlab", *arguments),
    ]


def accelerate(node: int, arguments: list[str]) -> list[str]:
    return [
        *("accelerate", "launch", "--multi_gpu", "--num_machines", "2", "--machine_rank", str(node)),
        *("--num_processes", "2", "--main_process_ip", ADDRESSES[0], "--main_process_port", PORT, "--mixed_precision"),
        *("no", "--dynamo_backend", "no", "-m", "shardlab", *arguments),
    ]


def deepspeed(node: int, arguments: list[str], hostfile: Path) -> list[str]:
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    return [
        *("deepspeed", "--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(node)),
        *("--master_addr", ADDRESSES[0], "--master_port", PORT, "--module", "shardlab", *arguments),
    ]


def arguments(recipe: Path, output: Path, *overrides: str) -> list[str]:
    return ["train", str(recipe), "--output", str(output), *(f"--set={override}" for override in overrides)]


def metrics(output: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.fixture
def alone(recipe: Path, tmp_path: Path) -> list[tuple[float, float]]:
    """Losses and norms of one process."""
    output = tmp_path / "alone"
    environment = {**os.environ, "SHARDLAB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "shardlab", *arguments(recipe, output)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=200)
    return metrics(output)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed", "torchrun-hsdp"])
def test_two_hosts_compute_what_one_process_does(
    launcher: str, hosts: tuple[str, str], recipe: Path, alone: list[tuple[float, float]], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    given = arguments(recipe, output, "shard.world_size=2")
    if launcher == "torchrun":
        commands = [torchrun(node, given) for node in (0, 1)]
    elif launcher == "accelerate":
        commands = [accelerate(node, given) for node in (0, 1)]
    elif launcher == "deepspeed":
        commands = [deepspeed(node, [*given, "--set=shard.backend=zero2"], tmp_path / "hosts") for node in (0, 1)]
    else:
        given = arguments(recipe, output, "shard.world_size=4", "shard.backend=fsdp", "shard.replicas=2")
        commands = [torchrun(node, given, ranks=2) for node in (0, 1)]
    job = Job(hosts, tmp_path, commands)
    try:
        assert job.wait(240) == [0, 0], job.text()
    finally:
        job.kill()
    for got, expected in zip(metrics(output), alone, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_a_lost_host_ends_the_job_within_a_minute(hosts: tuple[str, str], recipe: Path, tmp_path: Path) -> None:
    """The cable is pulled: no connection is closed, so only the collective's time-out can tell."""
    output = tmp_path / "out"
    overrides = ("train.steps=100000", "shard.world_size=2", "shard.timeout_seconds=15")
    job = Job(hosts, tmp_path, [torchrun(node, arguments(recipe, output, *overrides)) for node in (0, 1)])
    try:
        deadline = time.monotonic() + 120
        while not (output / "metrics.jsonl").exists() or not metrics(output):
            assert time.monotonic() < deadline, job.text()
            time.sleep(0.5)
        subprocess.run(["ip", "-n", hosts[1], "link", "set", CABLE, "down"], check=True)
        pulled = time.monotonic()
        assert job.processes[0].wait(60) != 0
        assert time.monotonic() - pulled < 60
    finally:
        job.kill()
    text = job.logs[0].read_text()
    assert "step " in text
    assert "rank 0" in text
