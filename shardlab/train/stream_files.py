"""Where a run of backend stream keeps its state's files."""

import hashlib
import sys
from pathlib import Path

from shardlab.backends.stream.store import remove_left_over
from shardlab.plan import Plan


def stream_directory(plan: Plan, output: Path) -> Path:
    """The directory of the run in `output`, without what a run of it that was killed has left there.

    Raises UserError where another process is at it.
    """
    directory = output / "stream"
    if plan.stream.directory is not None:  # runs may share it, so the name has the run's whole path in it
        path = str(output.absolute())
        mark = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
        directory = Path(plan.stream.directory) / f"{output.name}-{mark}"
    freed = remove_left_over(directory)
    if freed:
        left = f"{directory} held {freed / 2**20:,.0f} MiB of a run that was killed"
        print(f"{left}: removed, the state is made anew", file=sys.stderr)
    return directory
