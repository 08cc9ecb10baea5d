"""`shardlab train` on one process: what a run directory holds, and what is refused."""

import dataclasses
import gc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardlab.data import prepare_data
from shardlab.planner import resolve
from shardlab.recipe import load_recipe
from tests.train.support import Ended, losses, metrics, shardlab, steps, write_recipe


@dataclass(frozen=True)
class Run:
    """One run and where it lies."""

    recipe: Path
    directory: Path
    ended: Ended


def train(directory: Path, *arguments: str, **sections: dict[str, Any]) -> Run:
    """Train in `directory`/run by a tiny recipe."""
    recipe = write_recipe(directory, **sections)
    output = directory / "run"
    return Run(recipe, output, shardlab("train", recipe, "--output", output, *arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps, evaluated after the second and the last, told in JSON."""
    gc.collect()  # what earlier tests left, if freed meanwhile, would be missing from the peak
    return train(tmp_path_factory.mktemp("run"), "--json", "--set=train.evaluate_every=2")


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Times and bytes of all files."""
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in directory.rglob("*") if file.is_file()}


def test_a_run_directory_holds_these(run: Run) -> None:
    assert run.ended.code == 0, run.ended.err
    names = {str(file.relative_to(run.directory)) for file in run.directory.rglob("*")}
    assert names - {"model/tokenizer_config.json", "model/special_tokens_map.json"} == {
        "recipe.yaml",
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "model",
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
    }


def test_its_recipe_is_the_one_that_ran(run: Run) -> None:
    written = load_recipe(run.directory / "recipe.yaml")
    assert written == load_recipe(run.recipe, ["train.evaluate_every=2"])
    assert written.train.evaluate_every == 2


def test_its_plan_holds_no_auto(run: Run) -> None:
    plan = json.loads((run.directory / "plan.json").read_text())
    expected = dataclasses.asdict(resolve(load_recipe(run.recipe), world_size=1))
    summary = json.loads((run.directory / "summary.json").read_text())
    foreseen = {key: summary[key] for key in ("predicted_memory_bytes", "predicted_seconds_per_step")}
    beforehand = plan.pop("foreseen")
    assert beforehand["plan"].startswith("ddp")
    assert beforehand["state_bytes"] > 0
    assert plan == json.loads(json.dumps(expected)) | foreseen
    assert plan["backend"] == "ddp"
    assert plan["micro_batch"] * plan["accumulation"] == 4
    assert "auto" not in [value for key, value in plan.items() if key != "reasons"]


def test_its_memory_is_told_with_the_steps_and_around_them(run: Run) -> None:
    summary = json.loads((run.directory / "summary.json").read_text())
    around = summary["predicted_memory_bytes"]["around"]
    for phase in ("building", "writing"):
        (peak,), (base,) = summary[f"{phase}_memory_bytes"], summary["base_memory_bytes"]
        assert peak > 0.5 * base
        assert 0 <= around[phase]["low"] <= around[phase]["high"]
    assert around["model"] > 4 * summary["parameters"] - 1
    assert "building the model: " in run.ended.err


def test_its_metrics_have_a_row_for_each_step(run: Run) -> None:
    rows = steps(run.directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert set(rows[0]) == {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "skipped",
        "nonfinite_steps",
        "seconds",
        "tokens_per_second",
        "peak_memory_bytes",
    }
    assert rows[0]["loss"] == pytest.approx(math.log(320), rel=0.05), "of fresh weights: all tokens alike"
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 0.5e-3, 0.0])
    assert all(row["tokens"] == 4 * 32 and row["grad_norm"] > 0 and not row["skipped"] for row in rows)


def test_evaluations_come_when_asked_for_and_at_the_end(run: Run) -> None:
    """https://github.com/huggingface/accelerate/issues/226: rows came twice, or the last were cut off."""
    evaluations = [row for row in metrics(run.directory) if "evaluation_loss" in row]
    assert [row["step"] for row in evaluations] == [2, 3]
    held_out = prepare_data(load_recipe(run.recipe).data).evaluation
    assert held_out is not None
    for row in evaluations:
        assert row["evaluation_tokens"] == held_out.valid_tokens(range(len(held_out)))


def test_its_summary_agrees_with_its_metrics(run: Run) -> None:
    summary = json.loads((run.directory / "summary.json").read_text())
    rows = metrics(run.directory)
    assert (summary["steps"], summary["applied"], summary["nonfinite_steps"]) == (3, 3, 0)
    assert summary["loss"] == losses(run.directory)[-1]
    assert summary["evaluation_loss"] == rows[-1]["evaluation_loss"]
    assert (summary["backend"], summary["world_size"]) == ("ddp", 1)
    assert summary["parameters"] == sum(
        t.numel() for t in load_file(run.directory / "model/model.safetensors").values()
    )
    assert summary["peak_memory_bytes"][0] >= summary["base_memory_bytes"][0] > 0


def test_json_output_is_the_summary_and_nothing_else(run: Run) -> None:
    assert json.loads(run.ended.out) == json.loads((run.directory / "summary.json").read_text())
    assert "step 3/3" in run.ended.err
    assert str(run.directory / "model") in run.ended.err


def test_a_run_is_never_overwritten(run: Run) -> None:
    before = contents(run.directory)
    again = shardlab("train", run.recipe, "--output", run.directory)
    assert again.error == f"{run.directory} holds another run; choose another --output, or remove it"
    assert contents(run.directory) == before


def test_any_other_file_is_as_safe(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert "holds another run" in train(tmp_path).ended.error
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_an_empty_directory_is_free_and_set_wins_over_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = train(tmp_path, "--set", "train.steps=1", "--set=data.evaluation_fraction=0")
    assert done.ended.code == 0, done.ended.err
    assert len(metrics(done.directory)) == 1, "one step, and nothing held out"
    assert load_recipe(done.directory / "recipe.yaml").train.steps == 1
    assert json.loads((done.directory / "summary.json").read_text())["evaluation_loss"] is None
    assert str(done.directory / "summary.json") in done.ended.out


def test_without_output_each_run_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, train={"steps": 1}, data={"evaluation_fraction": 0.0})
    for _ in range(2):
        assert shardlab("train", recipe).code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["recipe", "recipe-2"]


def test_a_dry_run_says_all_and_does_nothing(tmp_path: Path) -> None:
    dry = train(tmp_path, "--dry-run", "--nproc", "2", "--set=train.global_batch_size=12")
    assert dry.ended.code == 0, dry.ended.err
    assert "backend fsdp" in dry.ended.out
    assert "micro_batch 6 x accumulation 1 x 2 ranks = 12 sequences" in dry.ended.out
    assert "backend auto = fsdp: at 2 ranks" in dry.ended.out
    assert "global_batch_size: 12" in dry.ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "text.txt"]


def test_a_dry_run_for_a_script(tmp_path: Path) -> None:
    dry = train(tmp_path, "--dry-run", "--json")
    told = json.loads(dry.ended.out)
    recipe = load_recipe(dry.recipe)
    assert told["recipe"] == recipe.model_dump(mode="json")
    assert told["plan"]["micro_batch"] == resolve(recipe, world_size=1).micro_batch
    assert not dry.directory.exists()


BUILDER = "tests.train.builders"


def test_a_module_with_its_own_loss_is_trained_and_saved(tmp_path: Path) -> None:
    """No Hugging Face class: `forward(batch)` returns the summed loss and the count."""
    done = train(tmp_path, model={"builder": f"{BUILDER}:scores"})
    assert done.ended.code == 0, done.ended.err
    assert losses(done.directory)[-1] < losses(done.directory)[0]
    saved = load_file(done.directory / "model" / "model.safetensors")
    assert set(saved) == {"tokens.weight", "scores.weight", "scores.bias"}
    assert not (done.directory / "model" / "config.json").exists()


def run_into_nan(directory: Path, policy: str, steps_: int = 5) -> Run:
    return train(
        directory,
        "--json",
        f"--set=train.on_nonfinite={policy}",
        f"--set=train.steps={steps_}",
        model={"builder": f"{BUILDER}:nan_at_step_3"},
        shard={"micro_batch": 4},
    )


def test_a_nan_stops_the_run_and_stands_in_its_log(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/6702: the log showed a healthy curve while the loss was NaN."""
    stopped = run_into_nan(tmp_path, "stop")
    assert "step 3: loss nan" in stopped.ended.error
    assert "train.on_nonfinite=skip" in stopped.ended.error
    rows = steps(stopped.directory)
    assert [row["loss"] for row in rows[2:]] == ["nan"]
    assert (rows[2]["skipped"], rows[2]["nonfinite_steps"]) == (True, 1)
    assert not (stopped.directory / "model").exists()
    assert not (stopped.directory / "summary.json").exists()


def test_a_nan_is_left_out_and_counted(tmp_path: Path) -> None:
    went_on = run_into_nan(tmp_path, "skip")
    assert went_on.ended.code == 0, went_on.ended.err
    rows = steps(went_on.directory)
    assert [row["skipped"] for row in rows] == [False, False, True, False, False]
    assert [row["nonfinite_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert rows[2]["loss"] == "nan"
    assert rows[2]["grad_norm"] == "nan"
    assert rows[3]["lr"] == rows[2]["lr"], "the schedule counts updates"
    assert rows[4]["loss"] < rows[0]["loss"]
    summary = json.loads(went_on.ended.out)
    assert (summary["steps"], summary["applied"], summary["nonfinite_steps"]) == (5, 4, 1)
    assert all(tensor.isfinite().all() for tensor in load_file(went_on.directory / "model/model.safetensors").values())


def test_json_output_stays_json_when_the_last_loss_is_nan(tmp_path: Path) -> None:
    ended = run_into_nan(tmp_path, "skip", steps_=3).ended
    assert json.loads(ended.out, parse_constant=pytest.fail)["loss"] == "nan"
