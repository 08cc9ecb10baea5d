"""The guard process: reads process groups from its input, kills them when that ends, and removes a scratch directory.

Run as a file by `processes.Guard`, alone and without site-packages, so that it starts in milliseconds.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    """Wait for the end of the input, which is the death of whoever holds the other end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes last
    for group in [int(line) for line in sys.stdin]:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # none of it is left
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
