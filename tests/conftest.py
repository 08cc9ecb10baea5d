"""Pools of ranks, for the whole session and all who need some: each rank's imports cost seconds."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pools


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
