"""How a process grows over many steps: `python -m tests.backends.growth BACKEND OFFLOAD STEPS`. Prints JSON.

To be run with `GLIBC_TUNABLES=glibc.malloc.tcache_count=0`: blocks that one thread allocates and another frees stay in
the other's cache, which fills over hundreds of steps and counts as in use.
"""

import ctypes
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from shardlab.plan import Offload
from tests.backends.stream import support
from tests.backends.stream.support import Case, running, window

SETTLED = 100  # steps; by then the allocator has what it keeps


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, bytes; the sum of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def allocated() -> int | None:
    """Bytes that malloc has given out; None where it is not glibc's."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    """The process's own memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measured() -> dict[str, int | None]:
    """What there is now: bytes, and Python's objects."""
    gc.collect()  # it empties the lists of freed objects too, which else fill over hundreds of steps
    return {"resident": resident(), "allocated": allocated(), "objects": sys.getallocatedblocks()}


def main(backend: str, offload: str, steps: int) -> None:
    """After the second step, after `SETTLED`, and after the last."""
    plan = support.Plan

    def with_offload(*given: object, **named: object) -> object:
        return replace(plan(*given, **named), offload=Offload(activations=offload))  # type: ignore[arg-type]

    case = Case(accumulation=1, recompute_blocks=2 if offload == "disk" else None)
    found = []
    with mock.patch.object(support, "Plan", with_offload), running(case, backend) as engine:
        for step in range(steps):
            engine.run_window(window(step, 1), 1e-3)
            if step + 1 in (2, SETTLED, steps):
                found.append(measured())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
