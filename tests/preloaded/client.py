# Written into a directory of its own with the names of the server's socket and of the real interpreter filled in.
# It is imported by nobody, and runs without site-packages: it starts in milliseconds.
import array
import json
import os
import signal
import socket
import sys

PYTHON, SOCKET = "PYTHON", "SOCKET"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON += tuple(range(signal.SIGRTMIN, signal.SIGRTMIN + 8))


def program(arguments):
    """(arguments without the options that a fork can do without, whether the rest is one that it can do)."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-B", "-W"):
        del rest[: 2 if rest[0] == "-W" else 1]
    return rest, bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


def main():
    rest, able = program(sys.argv[1:])
    if not able:
        os.execv(PYTHON, [PYTHON, *sys.argv[1:]])
    server = socket.socket(socket.AF_UNIX)
    server.connect(SOCKET)
    asked = json.dumps({"arguments": rest, "cwd": os.getcwd(), "environment": dict(os.environ)}).encode()
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server.sendmsg([len(asked).to_bytes(8, "big")], files)
    server.sendall(asked)
    answers = server.makefile()
    child = int(answers.readline())
    for number in PASSED_ON:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    ended = answers.readline()
    code = int(ended) if ended else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
