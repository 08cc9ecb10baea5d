"""One thread, and the environment as it was."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


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
