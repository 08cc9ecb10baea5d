"""Requests to save and stop, in real processes."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import time
from shardlab.runtime.stopping import REQUEST
REQUEST.listen()
print("ready", flush=True)
while not REQUEST.came:
    time.sleep(0.01)
print(REQUEST.name, flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_aborts(number: signal.Signals) -> None:
    """The same signal by two ways, from scheduler and launcher, is one request; one that comes later is another."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(number)
        time.sleep(3.2)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(5) == -number
