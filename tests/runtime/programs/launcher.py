"""Starts four ranks of `rank.py`, as `shardlab train --nproc 4` would: `launcher.py MODE DIRECTORY`."""

import sys
from pathlib import Path

from shardlab.runtime.launch import launch

if __name__ == "__main__":
    sys.exit(launch([sys.executable, str(Path(__file__).with_name("rank.py")), *sys.argv[1:]], 4))
