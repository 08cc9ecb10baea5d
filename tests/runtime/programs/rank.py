"""One rank of a small job, for the launcher's tests: `rank.py MODE DIRECTORY`.

Modes that end with "-gloo" meet their peers over gloo first; the others never import torch, to be quick.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from shardlab.errors import UserError
from shardlab.runtime.child import run_rank
from shardlab.topology import Topology, announced_rank, check_collectives

MODE, DIRECTORY = sys.argv[1], Path(sys.argv[2])


def main() -> int | None:
    """Write this rank's and its own child's process ids to the directory, then do what the mode says."""
    action, _, gloo = MODE.partition("-")
    rank = announced_rank()[0]
    if gloo:
        import accelerate  # noqa: F401 - the slow part, before a time-out runs
        from torch.distributed import distributed_c10d

        meet("ready", rank)
        topology = Topology.detect(expected_world_size=4, timeout_seconds=120)
        check_collectives(topology)
        if action == "block":  # only now: four ranks may take longer to meet
            distributed_c10d._set_pg_timeout(timedelta(seconds=4))
        rank = topology.rank
    kid = subprocess.Popen(["sleep", "600"])
    if action == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meet("pids", rank, f"{os.getpid()} {kid.pid}")
    if rank == 2 or action in ("user", "done", "saved", "stop", "restart", "usr1"):
        act(action)
    if not gloo:
        time.sleep(600)
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(1000))


def meet(name: str, rank: int, content: str = "") -> None:
    """Write a file whole, and wait for those of all four ranks."""
    partial = DIRECTORY / f"{rank}.{name}.partial"
    partial.write_text(content)
    partial.rename(DIRECTORY / f"{rank}.{name}")
    while len(list(DIRECTORY.glob(f"*.{name}"))) < 4:
        time.sleep(0.02)


def act(action: str) -> None:
    """What goes wrong, on rank 2; or what each rank does."""
    if action in ("raise", "stubborn"):
        raise ValueError("rank two has a bad day")
    if action == "exit":
        sys.exit(3)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "user":
        raise UserError("the recipe has no such key: mend it")
    if action == "done":
        sys.exit(0)
    if action == "stop":  # one rank is signalled itself and tells the others, which stop a little later
        time.sleep(0.3 * announced_rank()[0])
        sys.exit(75)
    if action == "restart":
        lives = len(list(DIRECTORY.glob(f"life-{announced_rank()[0]}-*")))
        (DIRECTORY / f"life-{announced_rank()[0]}-{lives}").write_text(" ".join(sys.argv[3:]))
        while len(list(DIRECTORY.glob(f"life-*-{lives}"))) < 4:
            time.sleep(0.02)  # one that is killed before it has counted would be a life behind, and sleep in the last
        if lives < 2 and announced_rank()[0] == 2:
            raise ValueError("rank two has a bad day")
        if lives == 2:
            sys.exit(0)
    if action == "usr1":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
        (DIRECTORY / f"handler-{os.getpid()}").touch()
    if action == "saved":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        (DIRECTORY / f"handler-{os.getpid()}").touch()
    time.sleep(600)  # block, wait, saved


sys.exit(run_rank(main))
