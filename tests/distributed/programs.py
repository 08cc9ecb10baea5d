"""A rank's program as a job of the pool, where the process it would have for itself is not what is tested."""

import importlib
import sys
from collections.abc import Sequence
from unittest import mock


def main_of(program: str, given: Sequence[str]) -> None:
    """What `python -m program GIVEN` does on this rank."""
    with mock.patch.object(sys, "argv", [program, *given]):
        importlib.import_module(program).main()
