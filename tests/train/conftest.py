"""One thread, the environment as it was, and a pool of two ranks for what a second rank changes."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.distributed.pool import Pools


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """An engine sets what its process needs; the next test starts without."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
