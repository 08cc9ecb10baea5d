"""Processes that must not outlive the one that started them.

Two means, because neither is enough: the kernel's parent-death signal is instant but reaches only the process that
asked for it, and a small guard process reaches whole sessions (compilers, data workers).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from shardlab.runtime.guard import kill_session

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl.h
_POLL_SECONDS = 0.05
_KILL_SECONDS = 2.0


def die_with(parent: int) -> None:
    """Have this process killed when process `parent`, which started it, is gone; at once if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Become the parent of what our processes leave behind, so that `end_sessions` sees it gone, not only signalled.

    Linux only; elsewhere init reaps orphans, in its own time.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


class Guard:
    """A process that kills the sessions it was told of, should this process die without closing it.

    It learns of the death from the end of its standard input, which no signal can prevent; so it works for SIGKILL too.
    The directory `scratch` is then removed as well.
    """

    def __init__(self, scratch: Path) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(scratch)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def watch(self, leaders: Iterable[int]) -> None:
        """Add sessions, by their leaders' process ids."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{leader}\n" for leader in leaders))
        self._process.stdin.flush()


def end_sessions(
    leaders: Sequence["subprocess.Popen[bytes]"],
    *,
    grace_seconds: float,
    first: signal.Signals = signal.SIGTERM,
) -> None:
    """End processes, each the leader of its own session, and all that they started.

    Those that run get the signal `first` and `grace_seconds` to go; then every session is killed, also one whose leader
    has gone. An exception (a second signal to this process) cuts the grace short. Returns when all have gone, but
    waits no more than a few seconds for one that the kernel can't end (a device that doesn't answer).
    """
    try:
        for leader in leaders:
            if leader.poll() is None:
                with suppress(ProcessLookupError, PermissionError):  # it ended this moment
                    os.killpg(leader.pid, first)
        deadline = time.monotonic() + grace_seconds
        while any(leader.poll() is None for leader in leaders) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        killed = {pid for leader in leaders for pid in kill_session(leader.pid)}
        for leader in leaders:
            with suppress(subprocess.TimeoutExpired):
                leader.wait(_KILL_SECONDS)
        _reap(killed - {leader.pid for leader in leaders})


def _reap(pids: Iterable[int]) -> None:
    """Reap those that were left to us (see `adopted_orphans`)."""
    deadline = time.monotonic() + _KILL_SECONDS
    for pid in pids:
        with suppress(ChildProcessError):  # not ours, or not any more
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)


def path_with_tools(path: str) -> str:
    """`path` with this Python's own directory first: `ninja` is there, and PATH lacks a venv that isn't activated."""
    own = str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else own + os.pathsep + path
