"""The examination of a machine, check by check."""

from collections.abc import Iterator

from shardlab.doctor.check import Check
from shardlab.doctor.locks import check_locks
from shardlab.doctor.selftest import check_backends
from shardlab.doctor.system import check_system


def examine(*, self_test: bool = True) -> Iterator[Check]:
    """Every check, as it is done; `self_test` runs two ranks on every backend."""
    yield from check_system()
    yield from check_locks()
    if self_test:
        yield from check_backends()
