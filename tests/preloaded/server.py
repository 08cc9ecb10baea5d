"""`python -m tests.preloaded.server SOCKET PYTHON`: imports everything, then forks for whoever asks at the socket.

A fork belongs to the connection by which it was asked for: if that ends first, its client was killed, and so is it.
When this process's standard input ends, or this process does, all of them are killed.
"""

import array
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "tests.distributed.imports",
    "accelerate",
    "datasets",
    "shardlab.cli.training",
    "shardlab.planner.survey",
    "shardlab.runtime.launch",
    "shardlab.train.run",
    "torch.distributed.run",
    "transformers.trainer",
)
PARENT_VARIABLE = "SHARDLAB_PARENT"  # who is to be the parent, see shardlab.runtime.child
_PR_SET_PDEATHSIG = 1


def serve(path: str, python: str) -> None:
    """Until standard input ends."""
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as events:
        listening.bind(path)
        listening.listen(64)
        ended, wake = socket.socketpair()
        for end in (ended, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for source in (listening, ended, sys.stdin):
            events.register(source, selectors.EVENT_READ)
        print("ready", flush=True)
        forks: dict[socket.socket, int] = {}
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    for pid in forks.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is listening:
                    client, _ = listening.accept()
                    forks[client] = _fork(client, python)
                    events.register(client, selectors.EVENT_READ)
                elif key.fileobj is ended:
                    ended.recv(4096)
                elif key.fileobj in forks:  # a client says nothing after its request: it has gone
                    client = key.fileobj  # type: ignore[assignment]
                    events.unregister(client)
                    with suppress(ProcessLookupError):
                        os.kill(forks[client], signal.SIGKILL)
            for client, pid in list(forks.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del forks[client]
                    with suppress(KeyError):
                        events.unregister(client)
                    with suppress(OSError):
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    client.close()


def _fork(client: socket.socket, python: str) -> int:
    files = array.array("i")
    head, control, _, _ = client.recvmsg(8, socket.CMSG_SPACE(3 * files.itemsize))
    files.frombytes(control[0][2])
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(client.recv(left))
        left -= len(parts[-1])
    asked = json.loads(b"".join(parts))
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(asked, list(files), server, python)
        except BaseException:  # noqa: BLE001  (nothing of this process may go on in the fork)
            traceback.print_exc()
        os._exit(70)
    for file in files:
        os.close(file)
    client.sendall(f"{pid}\n".encode())
    return pid


def _become(asked: dict[str, Any], files: list[int], server: int, python: str) -> NoReturn:
    """Run what was asked for as a process of its own would, and end as it would."""
    environment = asked["environment"]
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(70)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 65536))
    unbuffered = {"line_buffering": True, "write_through": True} if environment.get("PYTHONUNBUFFERED") else {}
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb"), encoding="utf-8", **unbuffered)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb"), encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.chdir(asked["cwd"])
    if PARENT_VARIABLE in environment:
        environment[PARENT_VARIABLE] = str(server)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    random.seed()
    sys.executable = python
    sys.path[:] = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    code = _run(asked["arguments"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(arguments: list[str]) -> int:
    """The interpreter's own part: find the program, run it as `__main__`, say what ended it."""
    first, *rest = arguments
    try:
        if first == "-m":
            sys.argv, sys.path[:0] = rest, [os.getcwd()]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = arguments, [str(Path(first).resolve().parent)]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001  (as the interpreter does)
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Import, and serve."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never looked at stays shared
    serve(*sys.argv[1:])


if __name__ == "__main__":
    main()
