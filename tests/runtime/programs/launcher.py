"""Starts four ranks of `rank.py`, as `shardlab train --nproc 4` would: `launcher.py MODE DIRECTORY`."""

import os
import sys
from pathlib import Path

from shardlab.runtime.launch import launch

if __name__ == "__main__":
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), *sys.argv[1:]]
    restarts = int(os.environ.get("RESTARTS", "0"))
    sys.exit(launch(command, 4, max_restarts=restarts, restart_command=[*command, "--resume"]))
