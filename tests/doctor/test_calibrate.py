"""The calibration: it measures what the planner reads, in a short variant; what the figures are is bench's matter."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.doctor import calibrate as calibrating
from shardlab.doctor.measure import counted, quickest
from shardlab.planner import calibration
from shardlab.planner.machine import this_machine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path))
    return tmp_path


def test_work_is_counted_as_the_planner_counts_it() -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    assert counted(lambda: a @ b).products == 2 * 8 * 16 * 4
    assert counted(lambda: a + a).moved == 3 * 8 * 16 * 4
    runs: list[int] = []
    assert quickest(lambda: runs.append(1), 0.0, torch.device("cpu")) >= 0
    assert len(runs) == 4  # one to warm up, three timed


@pytest.mark.usefixtures("preloaded")
def test_a_calibration_is_what_plans_go_by(cache: Path) -> None:
    """Before: another machine's figures, with a wider error. After: its own, also for more ranks than it measured."""
    before = this_machine(1).rates
    assert before is not None
    assert before.source == calibration.OTHERS
    found = calibrating.calibrate(seconds=0.01, disk_bytes=1024**2, width=64)
    assert json.loads((cache / "calibration.json").read_text()) == found
    for ranks in (1, 2, 4):
        rates = this_machine(ranks).rates
        assert rates is not None
        assert rates.source == calibration.MEASURED
        assert rates.error < before.error
        assert rates.disk == found["disk"]["both"]
        positive = [*rates.products.values(), *rates.attention.values(), *rates.link.values()]
        assert set(rates.reached) == {"fp32", "bf16"}
        positive += [share for by_tokens in rates.reached.values() for share in by_tokens.values()]
        positive += [rates.memory, rates.stream, rates.operation, rates.hop]
        assert all(figure > 0 for figure in positive)
    assert this_machine(2).rates.products["fp32"] == found["ranks"]["2"]["products"]["fp32"]  # type: ignore[union-attr]
    assert min(found["disk"].values()) > 0
    said = "\n".join(calibrating.lines(found))
    assert "each of 2 ranks" in said
    assert str(cache / "calibration.json") in said


def test_figures_of_another_machine_are_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration.write({"ranks": {}})
    assert calibration.read() is not None
    monkeypatch.setattr(calibration, "core_count", lambda: 1024)
    assert calibration.read() is None


def test_the_shipped_figures_have_the_form_of_a_calibration(cache: Path) -> None:
    """So `shardlab doctor --calibrate --json` writes a new file of them."""
    shipped: dict[str, Any] = json.loads(
        resources.files("shardlab.planner").joinpath("calibration.json").read_text(encoding="utf-8")
    )
    for ranks, figures in shipped["ranks"].items():
        made = calibration.rates(shipped["ranks"], int(ranks), 2, "", 0.5, shipped["disk"])
        assert set(made.products) == set(made.reached) == {"fp32", "bf16"}
        assert figures["threads"] >= 1
    assert set(shipped["ranks"]["2"]["link"]) == {"all-reduce", "all-gather", "reduce-scatter"}


def test_a_disk_is_measured_and_nothing_is_left_there(tmp_path: Path) -> None:
    rates = calibrating.disk_rates(tmp_path, 2 * 1024**2)
    assert set(rates) == {"write", "read", "both"}
    assert min(rates.values()) > 0
    assert list(tmp_path.iterdir()) == []
