"""A checkpoint of four ranks is exported or converted by processes that may have 600 MB. Field case B46.

`python -m tests.checkpoint.sized ROOT TENSORS`, of 150 MiB each with its moments. `RLIMIT_DATA` bounds a process's
private writable memory, the libraries' own included. Prints JSON: for each command its exit code, the most anonymous
memory that was resident, how much of that was there before it began, and its seconds.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from shardlab.checkpoint import Contents, Saver
from shardlab.checkpoint.export import export
from shardlab.checkpoint.ranks import Ranks
from shardlab.state.box import Box
from shardlab.state.fragment import MASTER, Fragment, OptimizerState
from tests.checkpoint.support import on_ranks, succeed

RANKS, ROWS, COLUMNS = 4, 5120, 2560
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
LIMIT_BYTES = 600 * 10**6
TENSOR_BYTES = 4 * ROWS * COLUMNS


def save(root: Path, tensors: int) -> Path:
    """Each rank has a quarter of the rows of each tensor; their values repeat."""
    rows = ROWS // RANKS

    def job(ranks: Ranks) -> Path:
        values = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(ranks.rank)).abs()

        def fragments() -> Iterator[Fragment]:
            for name in names:
                for kind in KINDS:
                    yield Fragment(name, kind, (ROWS, COLUMNS), Box((rows * ranks.rank, 0), (rows, COLUMNS)), values)

        return Saver(root, ranks).save(contents, fragments)

    names = [f"layers.{number}.weight" for number in range(tensors)]
    group = {"names": names, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = OptimizerState(KINDS[1:], {name: {"step": 7.0} for name in names}, (group,))
    contents = Contents(step=7, optimizer=optimizer, attachments={"config.json": b"{}"})
    return succeed(on_ranks(RANKS, job))[0]


def command(*arguments: object, limited: bool = True) -> dict[str, float]:
    """`shardlab checkpoint ...` in a process of its own."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))

    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.sized_job", *map(str, arguments)],
        preexec_fn=limit if limited else None,
        stdout=subprocess.PIPE,
        text=True,
    )
    begun = time.monotonic()
    out, _ = process.communicate()
    measured = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {}
    return {"code": process.returncode, "seconds": time.monotonic() - begun, **measured}


def main(root: Path, tensors: int) -> None:
    ours = save(root / "ours", tensors)
    found = {"export": command("export", ours, root / "model")}
    export(ours, root / "unlimited")
    found["to dcp"] = command("convert", ours, root / "dcp", "--to", "dcp")
    if tensors <= 2:  # every way there is
        found["from dcp"] = command("convert", root / "dcp", root / "from-dcp")
        found["to zero3"] = command("convert", ours, root / "zero3", "--to", "zero3", "--world-size", RANKS)
        # What torch maps of a file is private and counts in full against the limit; it takes no memory.
        found["from zero3"] = command("convert", root / "zero3", root / "from-zero3", limited=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
