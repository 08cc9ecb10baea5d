"""Pools of ranks, for the whole session and all who need some: each rank's imports cost seconds.

And what hypothesis draws: the same in each run, however slow the machine is. `pytest --hypothesis-profile=search` draws
anew, and more.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.pool import Pools

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
