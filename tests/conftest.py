"""Pools of ranks and a preloaded Python, for the whole session and all who need them: imports cost seconds.

Under `pytest -n 2 --dist loadgroup` all that starts processes of its own or needs a pool is one worker's, in the order
that it always has. What computes in one process on one core is shared out by directory: the other worker's, and that
worker's too when it is done.

And what hypothesis draws: the same in each run, however slow the machine is. `pytest --hypothesis-profile=search` draws
anew, and more.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.pool import Pools
from tests.preloaded import Preloaded

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
TOGETHER = {
    Path("data/test_field_cases.py"),
    Path("export/test_artifact.py"),
    Path("planner/test_emit.py"),
    Path("planner/test_handover.py"),
}


@pytest.hookimpl(tryfirst=True)  # xdist and `-m` read the marks after
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"pools", "preloaded"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)  # starting what they need takes longer than most tests
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(Path(__file__).parent)
        alone = file.parts[0] in ALONE and file not in TOGETHER
        item.add_marker(pytest.mark.xdist_group(file.parts[0] if alone else "together"))


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def _preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    preloaded = Preloaded(tmp_path_factory.mktemp("preloaded"))
    yield preloaded
    preloaded.close()


@pytest.fixture
def preloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test starts of Python, and what that starts, has its libraries: see `tests.preloaded`. Linux only."""
    if sys.platform != "linux":
        return
    found: Preloaded = request.getfixturevalue("_preloaded")
    monkeypatch.setattr(sys, "executable", str(found.python))
    monkeypatch.setenv("PATH", f"{found.bin}{os.pathsep}{os.environ['PATH']}")
