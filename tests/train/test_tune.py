"""`shardlab tune`: what is tried, what is learnt of failures, and real trials on ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.plan import Footprint, ModelShape, Plan
from shardlab.planner import resolve
from shardlab.planner.cost import Cost
from shardlab.planner.machine import GIB, Machine
from shardlab.planner.search import Candidate, Survey
from shardlab.recipe import Recipe, load_recipe
from shardlab.runtime.job import Ended
from shardlab.train import tune
from shardlab.train.tune import Measured, Trial

FOOTPRINT = Footprint("forward", {}, {}, 0, 0, 0, 0, 0, 0)
PLAN = Plan("ddp", 2, 1, 8, 16, "fp32")


def candidate(backend: str, micro_batch: int, seconds: float, left: int = 1) -> Candidate:
    plan = replace(PLAN, backend=backend, micro_batch=micro_batch, accumulation=8 // micro_batch)
    return Candidate(plan, FOOTPRINT, left, Cost(seconds, 1.0, 0.3, {}))


def survey(*candidates: Candidate, own: Candidate | None = None) -> Survey:
    shape = ModelShape((), 0, has_tail=False)
    return Survey(Machine("test", 2, False, GIB, GIB), Recipe(), shape, "", own, candidates)


def tries(found: Survey, failing: dict[tuple[str, int], tune.Outcome], top: int = 3) -> Iterator[Trial]:
    """Trials whose measured time is the predicted one, but for those that fail."""

    def attempt(one: Candidate) -> Trial:
        outcome = failing.get((one.plan.backend, one.plan.micro_batch))
        if outcome is not None:
            return Trial(one, outcome, "because")
        assert one.cost is not None
        return Trial(one, "measured", measured=Measured(one.cost.seconds, 1.0, 1))

    return tune.trials(found, attempt, top)


def shown(trials: Iterator[Trial]) -> list[tuple[str, int, str]]:
    return [(trial.plan.backend, trial.plan.micro_batch, trial.outcome) for trial in trials]


FOUND = survey(
    candidate("ddp", 4, 1.0),
    candidate("ddp", 8, 1.2),
    candidate("ddp", 2, 1.4),
    candidate("ddp", 1, 1.6),
    candidate("zero1", 4, 2.0),
    candidate("fsdp", 8, 3.0, left=-1),
    candidate("fsdp", 4, 3.5),
)


def test_the_fastest_by_prediction_come_first_and_two_of_a_kind_are_enough() -> None:
    assert shown(tries(FOUND, {}, top=4)) == [
        ("ddp", 4, "measured"),
        ("ddp", 8, "measured"),
        ("zero1", 4, "measured"),
        ("fsdp", 4, "measured"),
    ]
    assert len(shown(tries(FOUND, {}, top=1))) == 1


def test_what_ran_out_of_memory_is_not_tried_with_more_and_a_smaller_one_is() -> None:
    assert shown(tries(FOUND, {("ddp", 4): "out of memory"})) == [
        ("ddp", 4, "out of memory"),
        ("ddp", 8, "not tried"),
        ("ddp", 2, "measured"),
        ("ddp", 1, "measured"),
        ("zero1", 4, "measured"),
    ]


def test_all_that_fail_come_to_an_end_and_to_no_best() -> None:
    everything = {(c.plan.backend, c.plan.micro_batch): "failed" for c in FOUND.candidates}
    trials = list(tries(FOUND, everything, top=1))  # type: ignore[arg-type]
    assert [t.outcome for t in trials].count("failed") == 2  # twice as many as were to be measured
    assert tune.best(trials) is None
    assert "none of the plans ran (2 failed); the last, ddp, micro-batch 2: because" in tune.nothing_ran(FOUND, trials)
    nothing = survey(candidate("fsdp", 1, 1.0, left=-GIB))
    assert tune.nothing_ran(nothing, []).startswith("no plan fits here; the nearest is fsdp, micro-batch 1, over by")


def test_the_recipes_own_plan_is_what_they_have_to_beat() -> None:
    own = candidate("zero1", 4, 0.5)
    trials = list(tries(replace(FOUND, own=own), {}))
    assert trials[0].candidate is own
    assert shown(iter(trials)).count(("zero1", 4, "measured")) == 1
    chosen = tune.best(trials)
    assert chosen is trials[0]
    hopeless = candidate("ddp", 2, 0.1, left=-GIB)
    assert "does not fit" in next(tries(replace(FOUND, own=hopeless), {})).reason


@pytest.mark.parametrize(
    ("code", "message", "outcome"),
    [
        (137, "rank 1 killed by signal 9 (likely out of memory)", "out of memory"),
        (1, "rank 0 failed:\nRuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "out of memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        (1, "ValueError: no", "failed"),
        (2, "error: the recipe", "failed"),
        (None, "no end within 3 s", "timed out"),
    ],
)
def test_a_failure_is_told_from_a_want_of_memory(code: int | None, message: str, outcome: str) -> None:
    assert tune._outcome(Ended(code, message)) == outcome


def test_the_tuned_recipe_resolves_to_the_plan_and_learns_the_same() -> None:
    recipe = Recipe.from_dict({"train": {"global_batch_size": 16}, "shard": {"backend": "fsdp", "replicas": 2}})
    plan = replace(PLAN, backend="zero1", micro_batch=4, accumulation=2, recompute="full")
    changed = tune.with_plan(recipe, plan)
    found = resolve(changed, world_size=2)
    assert (found.backend, found.micro_batch, found.accumulation, found.recompute, found.replicas) == (
        "zero1", 4, 2, "full", 1,
    )  # fmt: skip
    assert (changed.train, changed.data, changed.model) == (recipe.train, recipe.data, recipe.model)


def small(directory: Path, **train: object) -> Path:
    (directory / "text.txt").write_text("alpha beta gamma " * 400, encoding="utf-8")
    values = {
        "model": {"preset": "tiny"},
        "data": {"files": ["text.txt"], "tokenizer": "bytes", "sequence_length": 32, "cache_dir": "cache"},
        "train": {"global_batch_size": 4, "precision": "fp32", **train},
        "shard": {"backend": "zero1"},
    }
    path = directory / "mine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.usefixtures("preloaded")
def test_a_tuned_recipe_is_one_and_stands_beside_its_own(tmp_path: Path) -> None:
    """Real jobs of one rank: the recipe's own plan (ddp there, as `auto`) and one other."""
    recipe = small(tmp_path)
    options = ["tune", str(recipe), "--top", "1", "--steps", "3", "--json", "--set", "shard.backend=auto"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [trial["outcome"] for trial in found["trials"]] == ["measured", "measured"]
    assert found["best"]["measured"]["seconds"] == min(t["measured"]["seconds"] for t in found["trials"])
    assert all(trial["measured"]["peak_bytes"] > 0 for trial in found["trials"])
    file = tmp_path / "mine-tuned.yaml"
    assert found["output"] == str(file)
    tuned = load_recipe(file)
    assert tuned.shard.micro_batch == found["best"]["micro_batch"]
    assert tuned.shard.backend == "ddp"
    assert "s a step (predicted" in file.read_text()
    again = CliRunner().invoke(app, options)
    assert isinstance(again.exception, UserError)  # nothing is overwritten
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_failure_on_both_ranks_is_survived_and_all_failing_is_an_answer(tmp_path: Path) -> None:
    recipe = small(tmp_path, optimizer={"name": "sgd", "lr": 1e30}, clip_grad_norm=None)
    done = CliRunner().invoke(app, ["tune", str(recipe), "--nproc", "2", "--top", "1", "--steps", "3", "--json"])
    assert isinstance(done.exception, UserError)  # exit code 2
    assert "none of the plans ran" in str(done.exception)
    found = json.loads(done.stdout)
    assert found["best"] is None
    assert found["output"] is None
    assert {trial["outcome"] for trial in found["trials"]} <= {"failed", "not tried"}
    assert any("Lower train.optimizer.lr" in (trial["reason"] or "") for trial in found["trials"])
    assert not (tmp_path / "mine-tuned.yaml").exists()


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_plan_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    recipe = load_recipe(small(tmp_path))
    trial = tune.tried_on_ranks(recipe, steps=10**6, timeout_seconds=10.0)(candidate("ddp", 1, 1.0))
    assert trial.outcome == "timed out"
    assert trial.reason == "no end within 10 s"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_a_want_of_memory_is_survived(tmp_path: Path) -> None:
    """The recipe's own micro-batch needs more than the ranks may have, which the plan does not know."""
    recipe = small(tmp_path, global_batch_size=256)
    shard = ["--set=shard.backend=ddp", "--set=shard.micro_batch=256", "--set=data.sequence_length=256"]
    command = [sys.executable, "-m", "shardlab", "tune", str(recipe), "--top=1", "--steps=3", "--json", *shard]

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (800 * 2**20, 800 * 2**20))

    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, other = json.loads(done.stdout)["trials"]
    assert (own["micro_batch"], own["outcome"]) == (256, "out of memory")
    assert "can't allocate memory" in own["reason"]
    assert (other["micro_batch"], other["outcome"]) == (8, "measured")
    assert load_recipe(tmp_path / "mine-tuned.yaml").shard.micro_batch == 8
