"""Pools of ranks, for the whole session and all who need some: each rank's imports cost seconds.

Under `pytest -n 2 --dist loadgroup` all that starts processes of its own or needs a pool is one worker's, in the order
that it always has, and what computes in one process on one core is the other's.

And what hypothesis draws: the same in each run, however slow the machine is. `pytest --hypothesis-profile=search` draws
anew, and more.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.pool import Pools

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile("steady")

ALONE = (
    "backends",
    "checkpoint",
    "compress",
    "data",
    "export",
    "model",
    "planner",
    "state",
    "test_cli.py",
    "test_recipe.py",
)
TOGETHER = {Path("data/test_field_cases.py"), Path("planner/test_emit.py"), Path("planner/test_handover.py")}


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks after
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(Path(__file__).parent)
        alone = file.parts[0] in ALONE and file not in TOGETHER
        item.add_marker(pytest.mark.xdist_group("alone" if alone else "together"))


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
