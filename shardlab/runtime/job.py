"""A job of our launcher's in a process of its own, so that nothing it does can hang or end whoever asked for it.

`python -m shardlab.runtime.job MODULE NPROC ARGUMENT…` launches `python -m MODULE ARGUMENT…` as that many ranks.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from shardlab.errors import ExitCode
from shardlab.runtime.child import PARENT_VARIABLE
from shardlab.runtime.processes import die_with

_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.1
_LONGEST = 400  # characters of a cause


@dataclass(frozen=True)
class Ended:
    """How a job of ranks ended. `message` is the launcher's account of a failure; `code` is None if time ran out."""

    code: int | None
    message: str

    @property
    def done(self) -> bool:
        """Whether it ended well."""
        return self.code == ExitCode.DONE

    @property
    def cause(self) -> str:
        """The message in one line: of a traceback the exception, whose own text may have several."""
        lines = [line.rstrip() for line in self.message.splitlines() if line.strip()]
        if not lines:
            return f"exit code {self.code}"
        frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
        after = range(frames[-1], len(lines)) if frames else range(len(lines) - 1, len(lines))
        start = next((number for number in after if not lines[number].startswith(" ")), len(lines) - 1)
        return " ".join(" ".join(lines[start:]).split())[:_LONGEST]


class RankJob:
    """`module` as `nproc` ranks, for at most `timeout_seconds`. Left by any way, none of them is left."""

    launcher = "shardlab.runtime.job"  # the module that launches

    def __init__(self, module: str, arguments: Sequence[str], *, nproc: int, timeout_seconds: float):
        self._command = [sys.executable, "-m", self.launcher, module, str(nproc), *arguments]
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> "RankJob":
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
        self._deadline = time.monotonic() + self._timeout_seconds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._errors.close()

    def poll(self) -> Ended | None:
        """How it ended; None, after a moment, while it runs."""
        try:
            code = self._process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() < self._deadline:
                return None
            self._stop()
            return Ended(None, f"no end within {self._timeout_seconds:.0f} s")
        self._errors.seek(0)
        return Ended(code, self._errors.read())

    def wait(self) -> Ended:
        """How it ended, when it has."""
        while (ended := self.poll()) is None:
            pass
        return ended

    def _stop(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.terminate()  # the launcher ends its ranks, by force where it has to
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its guard then ends them
            self._process.wait()


def main() -> int:
    """The process that launches; whoever asked for it may be killed, and then it goes too, and its guard ends ranks."""
    die_with(int(os.environ.pop(PARENT_VARIABLE)))
    from shardlab.runtime.launch import launch

    module, nproc, *arguments = sys.argv[1:]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return launch([sys.executable, "-m", module, *arguments], int(nproc), stop_grace_seconds=2.0)


if __name__ == "__main__":
    sys.exit(main())
