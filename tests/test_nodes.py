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

from tests.train.support import shardlab

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces alone
PORT = "29577"
CABLE = "cable0"  # the interface in each of them
REACHABLE_SECONDS = 30  # for the cable: a second as a rule
JOB_SECONDS = 240  # for a job of fifteen on a quiet machine
LAST_WORDS_SECONDS = 45  # for a host whose peer has failed: it may fail of itself, and say more
RENDEZVOUS = ("--rdzv_conf", "timeout=150")  # a launcher that doesn't find its peer says so before the test gives up
# Prints nothing once a connection to the address is refused, which is to say that it was tried there.
PROBE = """
import contextlib, socket, sys
with contextlib.suppress(ConnectionRefusedError):
    socket.create_connection((sys.argv[1], 9), timeout=5).close()
"""


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
        for name, address in zip(names, reversed(ADDRESSES), strict=True):
            wait_until_reachable(name, address)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def wait_until_reachable(host: str, address: str) -> None:
    """An interface takes up to a second to pass packets after it is set up, and loses those before."""
    command = ["ip", "netns", "exec", host, sys.executable, "-I", "-S", "-c", PROBE, address]
    deadline = time.monotonic() + REACHABLE_SECONDS
    while (tried := subprocess.run(command, capture_output=True, text=True)).returncode:
        assert time.monotonic() < deadline, f"{address} can't be reached from {host}: {tried.stderr}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nodes")
    (directory / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)), encoding="utf-8")
    values = {
        "model": {"preset": "tiny"},
        "data": {"files": ["text.txt"], "tokenizer": "bytes", "sequence_length": 32, "cache_dir": "cache"},
        "train": {"steps": 3, "global_batch_size": 4, "precision": "fp32", "schedule": {"warmup_steps": 1}},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class Job:
    """The same command on each host, with its own rank of the host."""

    def __init__(self, hosts: tuple[str, str], tmp_path: Path, commands: list[list[str]]):
        self.hosts = hosts
        self.logs = [tmp_path / f"{host}.log" for host in hosts]
        environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": CABLE,
            "PYTHONFAULTHANDLER": "1",
        }
        self.processes = []
        for host, log, command in zip(hosts, self.logs, commands, strict=True):
            with log.open("w") as stream:
                started = subprocess.Popen(
                    ["ip", "netns", "exec", host, *command], stdout=stream, stderr=subprocess.STDOUT, env=environment
                )
            self.processes.append(started)

    def finish(self, seconds: float) -> None:
        """Until both hosts' launchers have ended well; if not, all that they said, and where each process stands.

        A host whose peer has failed may wait for it far longer than the test: it gets some seconds, then counts as
        waiting.
        """
        deadline = time.monotonic() + seconds
        while (codes := [process.poll() for process in self.processes]) != [0, 0]:
            if any(codes):
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
            if None not in codes or time.monotonic() > deadline:
                raise AssertionError(f"exit codes of the hosts: {codes} (None: it still waits)\n{self.report()}")
            time.sleep(0.1)

    def report(self) -> str:
        """Both logs, at the end of each the stacks of the host's processes that still run; they are aborted for it."""
        for host in self.hosts:
            signal_host(host, signal.SIGABRT)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        return "\n".join(f"---- {host}\n{log.read_text()}" for host, log in zip(self.hosts, self.logs, strict=True))

    def kill(self) -> None:
        for host in self.hosts:
            signal_host(host, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def signal_host(host: str, number: signal.Signals) -> None:
    """To every process there: a launcher's ranks have sessions of their own."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def torchrun(node: int, arguments: list[str], ranks: int = 1) -> list[str]:
    return [
        *("torchrun", "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", str(ranks)),
        *RENDEZVOUS,
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


@pytest.fixture(scope="module")
def alone(recipe: Path) -> list[tuple[float, float]]:
    """Losses and norms of one process."""
    output = recipe.with_name("alone")
    ended = shardlab(*arguments(recipe, output))
    assert ended.code == 0, ended.err
    return metrics(output)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_two_hosts_compute_what_one_process_does(
    launcher: str, hosts: tuple[str, str], recipe: Path, alone: list[tuple[float, float]], tmp_path: Path
) -> None:
    """Under torchrun two ranks on each, sharded within a host and replicated between them."""
    output = tmp_path / "out"
    given = arguments(recipe, output, "shard.world_size=2")
    if launcher == "accelerate":
        commands = [accelerate(node, given) for node in (0, 1)]
    elif launcher == "deepspeed":
        commands = [deepspeed(node, [*given, "--set=shard.backend=zero2"], tmp_path / "hosts") for node in (0, 1)]
    else:
        given = arguments(recipe, output, "shard.world_size=4", "shard.backend=fsdp", "shard.replicas=2")
        commands = [torchrun(node, given, ranks=2) for node in (0, 1)]
    job = Job(hosts, tmp_path, commands)
    try:
        job.finish(JOB_SECONDS)
    finally:
        job.kill()
    for got, expected in zip(metrics(output), alone, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_a_lost_host_ends_the_job_within_a_minute(hosts: tuple[str, str], recipe: Path, tmp_path: Path) -> None:
    """The cable is pulled: no connection is closed, so only the collective's time-out can tell."""
    output = tmp_path / "out"
    overrides = ("train.steps=100000", "shard.world_size=2", "shard.timeout_seconds=20")
    job = Job(hosts, tmp_path, [torchrun(node, arguments(recipe, output, *overrides)) for node in (0, 1)])
    try:
        deadline = time.monotonic() + JOB_SECONDS
        while not (output / "metrics.jsonl").exists() or not metrics(output):
            assert time.monotonic() < deadline, job.report()
            time.sleep(0.5)
        subprocess.run(["ip", "-n", hosts[1], "link", "set", CABLE, "down"], check=True)
        try:
            code = job.processes[0].wait(60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the first host still waits for the other\n{job.report()}")
        assert code != 0
    finally:
        job.kill()
    text = job.logs[0].read_text()
    assert "step " in text
    assert "rank 0 lost another of the 2" in text
