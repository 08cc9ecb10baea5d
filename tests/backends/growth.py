"""How a process grows over many steps: `python -m tests.backends.growth BACKEND OFFLOAD STEPS`. Prints JSON."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from shardlab.plan import Offload
from tests.backends.stream import support
from tests.backends.stream.support import Case, running, window

SETTLED = 20  # steps; by then the allocator has what it keeps


def anonymous() -> int:
    """The process's own memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(backend: str, offload: str, steps: int) -> None:
    """Anonymous bytes after the second step, after `SETTLED`, and after the last."""
    plan = support.Plan

    def with_offload(*given: object, **named: object) -> object:
        return replace(plan(*given, **named), offload=Offload(activations=offload))  # type: ignore[arg-type]

    case = Case(accumulation=1, recompute_blocks=2 if offload == "disk" else None)
    found = {}
    with mock.patch.object(support, "Plan", with_offload), running(case, backend) as engine:
        for step in range(steps):
            engine.run_window(window(step, 1), 1e-3)
            if step + 1 in (2, SETTLED, steps):
                found[step + 1] = anonymous()
    print(json.dumps(list(found.values())))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
