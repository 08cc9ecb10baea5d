"""Requests to save and stop, in real processes."""

import signal
import subprocess
import sys

import pytest

# Its clock goes on by what it is told, so that no pause of this machine makes two requests of one.
PROGRAM = """
import sys
import time
from shardlab.runtime import stopping
now = 100.0
stopping.time.monotonic = lambda: now
stopping.REQUEST.listen()
print("ready", flush=True)
while not stopping.REQUEST.came:
    time.sleep(0.01)
print(stopping.REQUEST.name, flush=True)
for line in sys.stdin:
    now += float(line)
    print(now, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_aborts(number: signal.Signals) -> None:
    """The same signal by two ways, from scheduler and launcher, is one request; one that comes later is another."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.stdin.write("2.5\n")
        process.stdin.flush()
        assert process.stdout.readline() == "102.5\n"
        process.send_signal(number)
        process.stdin.write("0.75\n")
        process.stdin.flush()
        assert process.stdout.readline() == "103.25\n"  # it lives
        process.send_signal(number)
        assert process.wait(60) == -number
