"""The guard process: reads session leaders from its input, kills their sessions when that ends, removes a directory.

Run as a file by `processes.Guard`, alone and without site-packages, so that it starts in milliseconds.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Wait for the end of the input, which is the death of whoever holds the other end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes last
    for leader in [int(line) for line in sys.stdin]:
        kill_session(leader)
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


def kill_session(leader: int) -> set[int]:
    """Kill what `leader` and its descendants are or were, also if it has gone itself, and return their process ids.

    The session and not the process group: ninja gives each compiler a group of its own. Without /proc only the group.
    """
    killed: set[int] = set()
    with suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS says so of zombies
        os.killpg(leader, signal.SIGKILL)
    while found := _session_members(leader) - killed:  # again, for what was started meanwhile
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return killed


def _session_members(leader: int) -> set[int]:
    members = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == leader:
                members.add(int(entry.name))
        except (ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or not to be asked
    return members


if __name__ == "__main__":
    main()
