"""A fork looks from outside as the process that it stands for: what it says, how it ends, and that it ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.usefixtures("preloaded"), pytest.mark.skipif(sys.platform != "linux", reason="prctl")]

STAYS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


def run(*arguments: str, **named: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **named)


def test_it_has_what_it_was_given_and_its_libraries(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    code = "import os, sys, beside; print(beside.WORD, os.environ['A'], os.getcwd(), sys.argv, 'torch' in sys.modules)"
    done = run("-c", code, "b", cwd=tmp_path, env={**os.environ, "A": "a"}, input="")
    assert done.stdout == f"beside a {tmp_path} ['-c', 'b'] True\n"
    (tmp_path / "program.py").write_text("import beside; print(__name__, beside.WORD); print(input())")
    assert run(str(tmp_path / "program.py"), input="said").stdout == "__main__ beside\nsaid\n"
    assert run("-m", "shardlab", "--version").stdout.startswith("shardlab ")


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_a_process_does(code: str, ended: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == ended
    assert done.stderr.endswith(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_one_ends_the_other(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STAYS], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        fork = psutil.Process(int(started.stdout.readline()))
        assert fork.pid != started.pid
        started.send_signal(number)
        assert started.wait(60) == -number
    deadline = time.monotonic() + 60
    while fork.is_running() and fork.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_fork_starts_is_a_fork_too() -> None:
    inner = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    assert run("-c", code).stdout == "True\n"
