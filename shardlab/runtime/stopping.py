"""A request from outside to save and stop: TERM, as schedulers send before they kill, or USR1, as they warn with."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

# A scheduler signals every process of a job, launcher and ranks alike, and the launcher passes it on: one request.
_SAME_REQUEST_SECONDS = 3.0


class StopRequest:
    """Remembers that a signal came; a second one, later than moments after the first, ends the process at once.

    Windows has no USR1, and only TERM is listened for there.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._when = 0.0

    @property
    def came(self) -> bool:
        """Whether to save and stop."""
        return self._number is not None

    @property
    def name(self) -> str:
        """Of the signal."""
        return "no signal" if self._number is None else signal.Signals(self._number).name

    def listen(self) -> StopRequest:
        """Take the signals from now on. In another thread than the main one Python can't, and nothing is done."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)
            if sys.platform != "win32":
                signal.signal(signal.SIGUSR1, self._receive)
        return self

    def _receive(self, number: int, _frame: object) -> None:
        if self._number is None:
            self._number, self._when = number, time.monotonic()
        elif time.monotonic() - self._when > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


REQUEST = StopRequest()  # signals are the process's, so there is one
