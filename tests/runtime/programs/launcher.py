"""Starts four ranks of `rank.py`, as `shardlab train --nproc 4` would: `launcher.py MODE DIRECTORY`.

With `SLOW_LOOK` in the environment all ranks end just after the launcher has seen them run.
"""

import os
import sys
from pathlib import Path
from typing import Any

from shardlab.runtime import launch as launching
from shardlab.runtime.launch import launch


def slow_look(agent: Any) -> Any:
    ended = look(agent)
    for rank in agent._ranks.values():
        rank.wait()
    return ended


look = launching._JobAgent._ended

if __name__ == "__main__":
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), *sys.argv[1:]]
    if "SLOW_LOOK" in os.environ:
        launching._JobAgent._ended = slow_look  # type: ignore[method-assign]
    restarts = int(os.environ.get("RESTARTS", "0"))
    sys.exit(launch(command, 4, max_restarts=restarts, restart_command=[*command, "--resume"]))
