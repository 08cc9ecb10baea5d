"""How much a process grows by saving, verifying and reading: `python -m tests.checkpoint.growth ROOT`. Prints JSON."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from shardlab.checkpoint import CheckpointReader, Contents, Saver, verify
from shardlab.checkpoint.export import export
from shardlab.state.box import Box
from shardlab.state.fragment import MASTER
from tests.checkpoint.support import small_state, whole_fragments

ROWS, COLUMNS, TENSORS = 5120, 2560, 4  # 50 MiB each


def resident(which: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{which}:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def growth(job: Callable[[], object]) -> int:
    """Peak resident bytes during `job` above those before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    job()
    return resident("VmHWM") - before


def main(root: Path) -> None:
    warm = Saver(root / "warm").save(Contents(step=1), whole_fragments(small_state()))
    verify(warm)
    # Half of it is strided, so it can't be written as it lies.
    values = [torch.randn(ROWS, COLUMNS) if n % 2 else torch.randn(COLUMNS, ROWS).t() for n in range(TENSORS)]
    state = {(f"w{n}", MASTER): value for n, value in enumerate(values)}
    saved: list[Path] = []
    found = {"save": growth(lambda: saved.append(Saver(root / "run").save(Contents(step=1), whole_fragments(state))))}
    state.clear()
    values.clear()
    found["verify"] = growth(lambda: verify(saved[0]))
    (root / "like").mkdir()
    (root / "like" / "config.json").write_text("{}")
    found["export"] = growth(lambda: export(saved[0], root / "out", "bf16", root / "like"))
    with CheckpointReader(saved[0]) as reader:
        rows = Box((ROWS // 2, 0), (ROWS // 4, COLUMNS))
        columns = Box((0, 8), (ROWS, COLUMNS // 4))
        for name, box, dtype in (
            ("rows", rows, torch.float32),
            ("rows converted", rows, torch.bfloat16),
            ("columns", columns, torch.float32),
        ):
            into = [torch.zeros(box.lengths, dtype=dtype) for _ in range(TENSORS)]

            def read(box: Box = box, into: list[torch.Tensor] = into) -> None:
                for n, target in enumerate(into):
                    reader.read_into(f"w{n}", MASTER, box, target)

            found[name] = growth(read)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
