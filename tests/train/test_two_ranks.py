"""`shardlab train` on two ranks: the same run as on one, told once."""

import json
from pathlib import Path

import pytest

from tests.distributed.pool import Pools
from tests.train.support import losses, metrics, shardlab, steps, write_recipe


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_two_ranks_train_the_run_of_one(pools: Pools, tmp_path: Path, backend: str) -> None:
    """Losses, rates and evaluation; each held-out row counts once, though no number of rows here divides evenly.

    https://github.com/huggingface/accelerate/issues/2142: on two ranks the schedule went twice as fast.
    """
    recipe = write_recipe(tmp_path, train={"evaluate_every": 2}, shard={"micro_batch": 2})
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert shardlab("train", recipe, "--output", alone).code == 0
    recipe = write_recipe(tmp_path, train={"evaluate_every": 2}, shard={"micro_batch": 1, "backend": backend})
    summary, nothing = pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=together)
    assert nothing is None
    assert summary == json.loads((together / "summary.json").read_text())
    assert (summary["backend"], summary["world_size"]) == (backend, 2)
    assert len(summary["peak_memory_bytes"]) == len(summary["base_memory_bytes"]) == 2
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert [row["lr"] for row in steps(together)] == [row["lr"] for row in steps(alone)]
    assert [row["tokens"] for row in steps(together)] == [row["tokens"] for row in steps(alone)]
    first, second = (
        [(row["step"], row["evaluation_loss"], row["evaluation_tokens"]) for row in metrics(run) if "loss" not in row]
        for run in (alone, together)
    )
    assert first == [(step, pytest.approx(loss, rel=1e-5), tokens) for step, loss, tokens in second]
    assert [step for step, _, _ in first] == [2, 3]


def test_auto_is_one_backend_on_both_ranks(pools: Pools, tmp_path: Path) -> None:
    """The first rank's choice, with its reason, which the plan of the run keeps."""
    recipe, output = write_recipe(tmp_path), tmp_path / "run"
    summary, _ = pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=output)
    plan = json.loads((output / "plan.json").read_text())
    assert summary["backend"] == plan["backend"]
    backend, micro_batch = plan["reasons"]
    assert backend.startswith(
        f"backend auto = {plan['backend']}: the fastest that fits; {plan['backend']}, micro-batch"
    )
    assert micro_batch == f"micro_batch auto = {plan['micro_batch']}, with it"


def test_a_directory_that_is_taken_is_refused_on_both_ranks(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    told = pools.run(2, "tests.train.jobs", "train_run", recipe=write_recipe(tmp_path), output=tmp_path / "run")
    assert all("holds another run" in text for text in told)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_schedule_counts_updates(pools: Pools, tmp_path: Path, accumulation: int) -> None:
    """https://github.com/huggingface/accelerate/issues/2926: 0.8 after one step on two ranks, 0.6 after another."""
    schedule = {"name": "linear", "warmup_steps": 0, "final_fraction": 0.8}
    recipe = write_recipe(tmp_path, train={"schedule": schedule, "optimizer": {"lr": 1.0}})
    for rates in pools.run(2, "tests.train.jobs", "rates", recipe=recipe, accumulation=accumulation):
        assert rates == pytest.approx([1.0, 0.9, 0.8])
