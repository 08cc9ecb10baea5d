"""The rank's side: runs the program, and turns whatever ends it into an exit code and one account of it.

Under our launcher the account goes to a file, and the launcher prints the one that came first; under another launcher,
or none, this process prints it itself.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardlab.errors import ExitCode, UserError
from shardlab.runtime.failure import ERROR_FILE_VARIABLE, classify, write_report
from shardlab.runtime.processes import die_with
from shardlab.topology import announced_rank

PARENT_VARIABLE = "SHARDLAB_PARENT"  # our launcher's process id; taken out here, so that it isn't passed on
STACK_FILE = "stack.txt"  # beside the error file: where this rank was, when the launcher asked
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 3  # a real-time signal: USR1 and USR2 are schedulers'

COLLECTIVE_DELAY_SECONDS = 4.0


def run_rank(main: Callable[[], int | None]) -> int:
    """Run `main` as one rank of a job, or as the only process, and return the exit code.

    UserError: its one line, code 2. SystemExit: its code. KeyboardInterrupt: 130. Anything else: a traceback, code 1.
    A failure among several ranks doesn't return: the process ends here, for the interpreter's own exit could wait for
    peers (threads of process groups), and be waited for.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    error_file = Path(os.environ[ERROR_FILE_VARIABLE]) if parent is not None else None
    if parent is not None:
        die_with(int(parent))
        _show_stack_on_signal(Path(os.environ[ERROR_FILE_VARIABLE]).with_name(STACK_FILE))
    try:
        code = main() or ExitCode.DONE
        _leave_group()
    except SystemExit as exit_:
        code = _system_exit_code(exit_)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - this is the last place that can say what happened
        code = ExitCode.USER if isinstance(error, UserError) else ExitCode.FAILURE
        _account(error, code, error_file)
    if code != ExitCode.DONE and announced_rank()[1] > 1:
        _end(code)
    return int(code)


def _account(error: BaseException, code: int, error_file: Path | None) -> None:
    """Say what ended this rank; of a collective's failure only after the true cause had time to show.

    When a rank dies, its peers' collectives fail within milliseconds, and theirs must not be taken for the first
    failure: whoever launched us sees the dead one meanwhile, and ends us before we say anything.
    """
    rank, world_size = announced_rank()
    waited = classify(error) == "collective" and world_size > 1
    if error_file is not None:
        write_report(error_file, error, code)
    if waited:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing left to save in an orderly way
        time.sleep(COLLECTIVE_DELAY_SECONDS)
    if error_file is None:
        prefix = f"[rank {rank}] " if rank > 0 else ""
        text = (
            f"error: {error}" if isinstance(error, UserError) else "".join(traceback.format_exception(error)).rstrip()
        )
        if waited:
            text += f"\nrank {rank} lost another of the {world_size}; if none says why, its host or the network did"
        print("\n".join(prefix + line for line in text.splitlines()), file=sys.stderr, flush=True)


def _system_exit_code(exit_: SystemExit) -> int:
    """As the interpreter would: None is 0, and anything but a number is a message, code 1."""
    if exit_.code is None:
        return ExitCode.DONE
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr, flush=True)
    return ExitCode.FAILURE


def _show_stack_on_signal(file: Path) -> None:
    """Let the launcher ask a rank that doesn't answer where it is; works while the interpreter is stuck in C."""
    if sys.platform == "win32":
        return
    faulthandler.register(STACK_SIGNAL, file=file.open("w"), all_threads=False)


def _leave_group() -> None:
    """Leave the process group in order, which NCCL asks for; only if the program has one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader has gone, or the program closed it
    os._exit(code)
