"""Our launcher: starts the ranks of a job on this host and sees to it that they end together.

torch's elastic agent does the rendezvous, the ranks' environment and the signals. What it lacks is here: it waits up
to 30 s for ranks that ignore SIGTERM, shows banners instead of the traceback, and returns 1 whatever the rank's code.
"""

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shardlab.errors import ExitCode
from shardlab.runtime.child import PARENT_VARIABLE, STACK_FILE, STACK_SIGNAL
from shardlab.runtime.environment import child_environment
from shardlab.runtime.failure import Ended, Report, describe, first_failure, read_report
from shardlab.runtime.processes import Guard, adopted_orphans, end_sessions
from shardlab.topology import LAUNCHER_VARIABLE

_FAILURE_GRACE_SECONDS = 4.0  # after a first failure nothing can be saved: peers get this long to tidy up
_STACK_SECONDS = 0.3
_MONITOR_SECONDS = 0.1


def launch(
    command: Sequence[str],
    nproc: int,
    *,
    stop_grace_seconds: float = 30.0,
    max_restarts: int = 0,
    restart_command: Sequence[str] | None = None,
) -> int:
    """Run `command` as `nproc` ranks on this host and return the exit code: 0, or that of the first failed rank.

    A rank that was killed by signal n counts as 128 + n. After the first failure the rest ends within seconds and its
    account comes last on stderr. TERM, INT and HUP are passed on to the ranks, which then have `stop_grace_seconds` to
    save and stop; a second one ends them at once. USR1 is passed on too. Ranks that save and stop on a signal of their
    own end the job with `ExitCode.STOPPED`. Whatever happens, also if this process is killed, no process of the job is
    left.

    After a failure that the user can't mend all ranks start again, with `restart_command` (or the same), up to
    `max_restarts` times.

    To be called from the main thread; the command's program uses `child.run_rank`.
    """
    code, failure = _launch_once(command, nproc, stop_grace_seconds)
    for restart in range(1, max_restarts + 1):
        if failure is None or code == ExitCode.USER:
            break
        print(f"restart {restart} of {max_restarts}: {nproc} ranks start again", file=sys.stderr, flush=True)
        code, failure = _launch_once(restart_command or command, nproc, stop_grace_seconds)
    return code


def _launch_once(command: Sequence[str], nproc: int, stop_grace_seconds: float) -> tuple[int, Ended | None]:
    """(the job's exit code, the failure that it comes from)."""
    with (
        tempfile.TemporaryDirectory(prefix="shardlab-") as directory,
        Guard(Path(directory)) as guard,
        _environment(child_environment(nproc, os.environ)),
        _silence(),
        _own_signals(),
        adopted_orphans(),
    ):
        agent = _JobAgent(command, nproc, Path(directory), guard, stop_grace_seconds)
        signal.signal(signal.SIGUSR1, agent.pass_on)
        try:
            agent.run()
        except SignalException as received:
            if agent.failure is None:
                return agent.stopped_code(received.sigval), None
        finally:
            agent.close()
    if agent.failure is None:
        return agent.own_code(), None
    sys.stdout.flush()
    print(agent.message, file=sys.stderr, flush=True)
    return agent.failure.exit_code, agent.failure


class _JobAgent(LocalElasticAgent):
    """The elastic agent for one host and no restarts, which ends the job in its own way.

    It overrides the steps that torch documents for it: starting, monitoring and shutting down workers.
    """

    def __init__(
        self, command: Sequence[str], nproc: int, directory: Path, guard: Guard, stop_grace_seconds: float
    ) -> None:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",  # 0: the system picks a free port, and the agent's own store holds it
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
        self._handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=self._handler,
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
            local_addr="localhost",
        )
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=str(directory)))
        self._guard = guard
        self._stop_grace_seconds = stop_grace_seconds
        self._ranks: dict[int, Popen[bytes]] = {}
        self._error_files: dict[int, Path] = {}
        self.failure: Ended | None = None
        self.message = ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)  # as for every entry point that is a command
        self._ranks = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._error_files = {rank: Path(file) for rank, file in context.error_files.items()}
        self._guard.watch(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look for a first failure ourselves, and end the job; torch looks when all ranks are gone.

        A look of its own at ranks that run could find what ours, a moment earlier, did not: it would end the job first.
        """
        ended = self._ended()
        failed = [end for end in ended if end.code not in (ExitCode.DONE, ExitCode.STOPPED)]
        if failed and self.failure is None:
            self.failure = first_failure(failed)
            self.message = self._describe(self.failure, ended)
            end_sessions(list(self._ranks.values()), grace_seconds=_FAILURE_GRACE_SECONDS)
        elif len(ended) < len(self._ranks):
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End what still runs, which after a signal to the launcher has time to save."""
        ranks = list(self._ranks.values())
        if any(process.poll() is None for process in ranks):
            _say_stopping(death_sig, self._stop_grace_seconds)
        end_sessions(ranks, first=death_sig, grace_seconds=self._stop_grace_seconds)
        super()._shutdown(death_sig, timeout=1)

    def pass_on(self, number: int, _frame: object) -> None:
        """A signal handler: tell the ranks, and nobody that they started."""
        for process in self._ranks.values():
            process.send_signal(number)

    def own_code(self) -> int:
        """The exit code of ranks that ended without a failure."""
        return max((process.poll() or 0 for process in self._ranks.values()), default=ExitCode.DONE)

    def stopped_code(self, number: int) -> int:
        """The exit code after a signal to the launcher: the ranks' own if they agree on one, else 128 + n."""
        codes = {process.poll() for process in self._ranks.values()}
        own = codes.pop() if len(codes) == 1 else None
        return own if own is not None and own >= 0 else 128 + number

    def close(self) -> None:
        """Give the rendezvous up, and its port with it."""
        self._handler.shutdown()

    def _ended(self) -> list[Ended]:
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        return [Ended(rank, code, self._report(rank)) for rank, code in codes.items() if code is not None]

    def _report(self, rank: int) -> Report | None:
        return read_report(self._error_files[rank])

    def _describe(self, first: Ended, ended: Sequence[Ended]) -> str:
        reports = {rank: report for rank in self._ranks if (report := self._report(rank)) is not None}
        waiting = {rank: report for rank, report in reports.items() if report.kind == "collective"}
        running = [rank for rank in self._ranks if rank not in reports and all(end.rank != rank for end in ended)]
        collective = first.report is not None and first.report.kind == "collective"
        return describe(first, ended, waiting, self._stacks(running) if collective else {})

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where these ranks are in their program; "" for one that doesn't say.

        A program that never called `run_rank` dies of the signal, a few seconds before it would anyway.
        """
        for rank in ranks:
            self._ranks[rank].send_signal(STACK_SIGNAL)
        time.sleep(_STACK_SECONDS)
        files = {rank: self._error_files[rank].with_name(STACK_FILE) for rank in ranks}
        return {rank: file.read_text().rstrip() if file.exists() else "" for rank, file in files.items()}


def _say_stopping(number: int, grace_seconds: float) -> None:
    print(
        f"stopping on {signal.Signals(number).name}: the ranks have {grace_seconds:.0f} s to save (again to end now)",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """The environment that the ranks inherit: torch's agent hands on this process's own."""
    before = dict(os.environ)
    os.environ.update(wanted)
    os.environ[LAUNCHER_VARIABLE] = os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Give back the signal handlers that torch's agent replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the agent's log lines and banners from the user: what matters of them is in our own message."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
