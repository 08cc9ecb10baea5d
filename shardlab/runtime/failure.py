"""What a rank says of its failure, and how the launcher reads it: which one came first, and what to show of it."""

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardlab.errors import ExitCode, UserError

Kind = Literal["user", "collective", "error"]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torch's launcher gives each rank a path of its own

# What gloo, NCCL and the store say when a peer is gone or doesn't come.
_COLLECTIVE_MESSAGE = re.compile(
    r"gloo|nccl|process ?group|Connection (closed|reset) by peer|Broken pipe|[Ss]ocket [Tt]imeout|"
    r"Timed out waiting|wait timeout|Connection refused|store.*timed? ?out",
    re.IGNORECASE,
)
_COLLECTIVE_TYPES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
_TIMEOUT_MESSAGE = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """A rank's own account of the exception that ends it."""

    kind: Kind
    message: str  # one line
    trace: str
    seconds: float  # when, since the epoch

    @property
    def timed_out(self) -> bool:
        """Whether it waited in vain for a rank, rather than losing the connection to one."""
        return self.kind == "collective" and _TIMEOUT_MESSAGE.search(self.message) is not None


@dataclass(frozen=True)
class Ended:
    """A rank that has ended: its exit code (negative: killed by that signal) and its report, if it left one."""

    rank: int
    code: int
    report: Report | None

    @property
    def exit_code(self) -> int:
        """As a shell would say it: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    def text(self) -> str:
        """What to print of it: the line that the user can mend, or the traceback with its last line last."""
        if self.report is None and self.code < 0:
            likely = " (likely out of memory)" if -self.code == signal.SIGKILL else f" ({_signal_name(-self.code)})"
            return f"rank {self.rank} killed by signal {-self.code}{likely}"
        if self.report is None:
            return f"rank {self.rank} ended with exit code {self.code}"
        if self.report.kind == "user":
            return f"error: {self.report.message}"
        return f"rank {self.rank} failed:\n{self.report.trace.rstrip()}"


def classify(error: BaseException) -> Kind:
    """Whose failure this is: the user's to mend, perhaps only the consequence of a peer's, or this rank's own.

    Known by names and messages: importing torch to ask would take seconds in a rank that fails before it needs it.
    """
    if isinstance(error, UserError):
        return "user"
    seen: BaseException | None = error
    while seen is not None:
        if _COLLECTIVE_TYPES & {kind.__name__ for kind in type(seen).__mro__}:
            return "collective"
        if isinstance(seen, RuntimeError) and _COLLECTIVE_MESSAGE.search(str(seen)):
            return "collective"
        seen = seen.__cause__ or seen.__context__
    return "error"


def write_report(file: Path, error: BaseException, exit_code: int) -> None:
    """Write the report in the form of torch's error files, with two keys of our own."""
    content = {
        "message": {
            "message": f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}",
            "errorCode": exit_code,
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        },
        "kind": classify(error),
        "seconds": time.time(),
    }
    partial = file.with_suffix(".partial")  # the launcher never sees half of it
    partial.write_text(json.dumps(content))
    partial.replace(file)


def read_report(file: Path) -> Report | None:
    """The report in the file, or None if the rank has left none."""
    if not file.exists():
        return None
    content: Mapping[str, Any] = json.loads(file.read_text())
    inner = content["message"]
    return Report(content["kind"], inner["message"], inner["extraInfo"]["py_callstack"], content["seconds"])


def first_failure(ended: Sequence[Ended]) -> Ended:
    """The failure that the others followed from, among ranks that failed within one look.

    A rank that lost a peer, or was aborted by a library that did, is a consequence if there is any other; then the
    earliest report; a rank that was killed wrote none, and comes before those that did.
    """

    def order(end: Ended) -> tuple[bool, bool, float]:
        consequence = end.report is not None and end.report.kind == "collective"
        return consequence, end.code == -signal.SIGABRT, end.report.seconds if end.report is not None else 0.0

    return min(ended, key=order)


def describe(first: Ended, ended: Sequence[Ended], waiting: Mapping[int, Report], silent: Mapping[int, str]) -> str:
    """The message for the whole job, the most telling last.

    `waiting`: reports of all ranks whose collective failed; `silent`: the ranks that still run without a report, with
    the stack they were seen at ("" if unknown).
    """
    if first.report is None or first.report.kind != "collective":
        return first.text()
    happened = "timed out" if any(report.timed_out for report in waiting.values()) else "failed"
    lines = [first.text(), f"a collective {happened}: {_ranks(waiting)} waited in it"]
    finished = [end.rank for end in ended if end.code == ExitCode.DONE]
    if finished:
        lines.append(f"{_ranks(finished)} had ended already, without an error")
    if silent:
        lines.append(f"{_ranks(silent)} did not arrive")
        lines += [f"rank {rank} was here:\n{stack}" for rank, stack in silent.items() if stack]
    return "\n".join(lines)


def _ranks(ranks: Mapping[int, object] | Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
