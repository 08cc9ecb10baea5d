"""A run that cannot fit is refused before its weights are made; one that ends tells its prediction beside its peak."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shardlab.errors import UserError
from shardlab.model.build import build_shell
from shardlab.plan import Plan
from shardlab.planner.machine import GIB
from shardlab.planner.names import gib
from shardlab.recipe import Recipe
from shardlab.topology import Topology
from shardlab.train.after_a_kill import FORESEEN, PLAN_FILE, after_a_kill
from shardlab.train.foresight import Foresight
from tests.train.support import shardlab, write_recipe

MIB = 2**20
THIRTY_MILLION: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
}


def _recipe(config: Path, every: int | None) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"config": str(config)},
            "data": {"tokenizer": "bytes", "sequence_length": 128},
            "train": {"global_batch_size": 2, "precision": "fp32"},
            "checkpoint": {"every": every},
        }
    )


def two_ranks(backend: Any) -> Plan:
    return Plan(backend, 2, 1, 1, 2, "fp32")


def foresee(directory: Path, memory_of_a_rank: int, backend: Any = "ddp", every: int | None = None) -> Foresight:
    config = directory / "config.json"
    config.write_text(json.dumps(THIRTY_MILLION))
    recipe = _recipe(config, every)
    # Two ranks are planned for; this process stands for one of them, without the other to talk to.
    alone = dataclasses.replace(Topology.detect(), host_memory_bytes=memory_of_a_rank)
    foresight = Foresight(recipe, two_ranks(backend), alone, vocabulary=257)
    foresight.refuse_what_cannot_fit(build_shell(recipe.model, vocabulary=257, sequence_length=128))
    return foresight


def test_what_cannot_fit_is_refused_with_what_fits(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4571: killed by signal 9 and nothing else."""
    with pytest.raises(UserError) as refused:
        foresee(tmp_path, 720 * MIB)
    message = str(refused.value)
    assert "this plan (ddp, micro-batch 1) does not fit: each of 2 ranks would need about 0." in message
    assert "and has 0.703; over by" in message
    assert "What fits: --set shard.backend=" in message


def test_a_plan_that_fits_is_not(tmp_path: Path) -> None:
    foresee(tmp_path, 720 * MIB, "fsdp")
    foresee(tmp_path, 64 * GIB)


def test_the_copy_that_saves_are_written_from_counts(tmp_path: Path) -> None:
    """Half the state of two ranks: 175 MiB beside the steps. Saved at once, the plan would fit."""
    with pytest.raises(UserError, match=r"does not fit.*What fits: --set checkpoint.asynchronous=false"):
        foresee(tmp_path, 720 * MIB, "fsdp", every=100)
    foresee(tmp_path, 720 * MIB, "fsdp", every=1000)  # never in this run of 200 steps


def test_where_nothing_fits_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no other plan for 2 ranks here fits either"):
        foresee(tmp_path, 400 * MIB)


def told(directory: Path, foresight: Foresight, since: float = 0.0) -> str | None:
    """What is said after a kill, of a run with fsdp that came as far as its plan."""
    planned = dataclasses.asdict(two_ranks("fsdp")) | {FORESEEN: foresight.foreseen()}
    (directory / PLAN_FILE).write_text(json.dumps(planned))
    return after_a_kill(_recipe(directory / "config.json", None), directory, since)


def test_a_kill_is_told_with_what_was_predicted(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3613: what the plan had promised, and what there was."""
    said = told(tmp_path, foresee(tmp_path, 720 * MIB, "fsdp"))
    assert said is not None
    assert said.startswith("the plan (fsdp, micro-batch 1) had predicted 0.")
    assert said.endswith("there are 0.703 for each")


def test_a_kill_of_a_plan_that_was_not_traced_is_told_all_the_same(tmp_path: Path) -> None:
    """A small one is traced only then: its rank says nothing, https://github.com/deepspeedai/DeepSpeed/issues/4571"""
    foresight = foresee(tmp_path, 64 * GIB, "fsdp")
    assert foresight.foreseen()["predicted"] is None
    said = told(tmp_path, foresight)
    assert said is not None
    assert said.startswith("the plan (fsdp, micro-batch 1) predicts 0.")
    assert said.endswith(f"there are {gib(64 * GIB)} for each")


def test_a_kill_of_a_plan_that_has_no_trace_is_told_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresight = foresee(tmp_path, 64 * GIB, "fsdp")

    def refuse(*_: object) -> None:
        raise UserError("rows of a builder's own")

    monkeypatch.setattr("shardlab.train.after_a_kill.predictor", refuse)
    said = told(tmp_path, foresight)
    assert said is not None
    assert f"GiB of state a rank, and there are {gib(64 * GIB)} for each" in said


def test_a_kill_before_the_plan_is_not_told_with_another_runs(tmp_path: Path) -> None:
    assert after_a_kill(_recipe(tmp_path, None), tmp_path, 0.0) is None
    assert told(tmp_path, foresee(tmp_path, 64 * GIB, "fsdp"), since=time.time() + 60) is None


def files(directory: Path) -> int:
    """Bytes of the tensors in a directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_a_run_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardlab.topology.host_memory_bytes", lambda: 100 * MIB)
    monkeypatch.setattr("shardlab.train.foresight.WORTH_A_TRACE", 0.0)
    ended = shardlab("train", write_recipe(tmp_path), "--output", tmp_path / "run")
    assert ended.code == 2
    assert "does not fit" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_run_ends_with_its_prediction_beside_its_peak(tmp_path: Path) -> None:
    ended = shardlab("train", write_recipe(tmp_path, checkpoint={"every": 2}), "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "MiB above the libraries; predicted " in ended.out
    assert "building the model: " in ended.out
    predicted = json.loads((tmp_path / "run" / "summary.json").read_text())["predicted_memory_bytes"]
    assert predicted["low"] <= predicted["middle"] <= predicted["high"]
    assert predicted["tensors"] == sum(predicted["by_kind"].values()) > 0
    assert predicted["moment"]
    around, saved = predicted["around"], tmp_path / "run" / "checkpoints" / "step-00000002"
    assert around["checkpoints"] == 2  # also one for a stop at the last step
    assert around["checkpoint"] == pytest.approx(files(saved), rel=0.03)
    assert around["snapshot"] == predicted["by_kind"]["snapshot"] == around["checkpoint"]  # of one rank
    assert around["model"] == pytest.approx(files(tmp_path / "run" / "model"), rel=0.03)
