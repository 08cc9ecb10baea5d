"""A Python whose libraries are imported already, for tests that start processes but don't test their start.

Importing torch, transformers and DeepSpeed costs each process five seconds of CPU. Here one process imports them once
(`server`), and `python`, a small script, asks it for a fork that does what it was asked itself: with its arguments,
environment, directory and files. The script stays as the process that others wait for, signal or kill.

Not for what looks at memory, at malloc's or OpenMP's settings, or at who is whose parent: there a process is to be one.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

_COMMANDS = ("shardlab", "torchrun", "accelerate", "deepspeed")
_CLIENT = Path(__file__).with_name("client.py")


class Preloaded:
    """The server, and the directory of programs that ask it."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        scripts = Path(sysconfig.get_path("scripts"))
        for tool in scripts.iterdir():  # ninja, and others that are looked for beside the interpreter
            if tool.name not in _COMMANDS and not tool.name.startswith("python"):
                (self.bin / tool.name).symlink_to(tool)
        socket, self.python = directory / "socket", self.bin / "python"
        client = _CLIENT.read_text(encoding="utf-8")
        client = client.replace('"PYTHON"', repr(sys.executable)).replace('"SOCKET"', repr(str(socket)))
        _write_program(self.python, f"#!{sys.executable} -IS\n{client}")
        for name in _COMMANDS:
            _, _, body = (scripts / name).read_text(encoding="utf-8").partition("\n")
            _write_program(self.bin / name, f"#!{self.python}\n{body}")
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "DS_ACCELERATOR": "cpu"}
        self._server = subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.preloaded.server", str(socket), str(self.python)],
            env={**os.environ, **quiet},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server, and its forks with it."""
        self._server.communicate()  # it ends when its input does


def _write_program(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
