"""Callbacks, in `train` and in a user's own loop: told everything, in order, on every rank, also of a failure."""

from pathlib import Path
from typing import Any

import pytest

from shardlab import Callback, Engine, load_recipe
from shardlab.errors import UserError
from shardlab.train.callbacks import Evaluation, StepResult
from shardlab.train.run import train
from tests.distributed.pool import Pools
from tests.train.loop import batch, tiny_llama, two_groups
from tests.train.support import metrics, write_recipe


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_start(self, engine: Engine) -> None:
        self.told.append(("start", len(list(engine.module.parameters())) > 0))

    def on_step(self, engine: Engine, result: StepResult) -> None:
        self.told.append(("step", result))

    def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
        self.told.append(("evaluate", evaluation))

    def on_end(self, engine: Engine, error: BaseException | None) -> None:
        self.told.append(("end", None if error is None else str(error)))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def silent(_: str) -> None:
    """Nobody listens."""


def test_train_tells_of_every_step_and_evaluation_in_order(tmp_path: Path) -> None:
    diary = Diary()
    recipe = load_recipe(write_recipe(tmp_path, train={"evaluate_every": 2}))
    train(recipe, tmp_path / "run", callbacks=[diary], say=silent)
    assert diary.kinds == ["start", "step", "step", "evaluate", "step", "evaluate", "end"]
    assert diary.told[-1] == ("end", None)
    rows = metrics(tmp_path / "run")
    for (_, told), row in zip(diary.told[1:-1], rows, strict=True):
        assert told.step == row["step"]
        if isinstance(told, Evaluation):
            assert (told.loss, told.tokens) == (row["evaluation_loss"], row["evaluation_tokens"])
        else:
            expected = (row["loss"], row["grad_norm"], row["lr"], row["peak_memory_bytes"], row["tokens_per_second"])
            assert expected == (
                told.loss,
                told.grad_norm,
                told.learning_rate,
                told.peak_memory_bytes,
                told.tokens_per_second,
            )


def test_the_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path))
    summaries = [train(recipe, tmp_path / str(n), callbacks=[Diary()] * n, say=silent) for n in (0, 1)]
    assert summaries[0] is not None
    assert summaries[1] is not None
    assert summaries[0]["loss"] == summaries[1]["loss"]
    assert summaries[0]["evaluation_loss"] == summaries[1]["evaluation_loss"]


def test_a_step_that_stops_the_run_is_told_and_so_is_the_end(tmp_path: Path) -> None:
    diary = Diary()
    recipe = load_recipe(write_recipe(tmp_path, model={"builder": "tests.train.builders:nan_at_step_3"}))
    with pytest.raises(UserError, match="step 3"):
        train(recipe, tmp_path / "run", callbacks=[diary], say=silent)
    assert diary.kinds == ["start", "step", "step", "step", "end"]
    assert [result.finite for kind, result in diary.told if kind == "step"] == [True, True, False]
    assert diary.told[-1][1].startswith("step 3: loss nan")


def test_a_run_that_is_refused_is_told_of_its_end_only(tmp_path: Path) -> None:
    diary = Diary()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").touch()
    with pytest.raises(UserError, match="holds another run"):
        train(load_recipe(write_recipe(tmp_path)), tmp_path / "run", callbacks=[diary], say=silent)
    assert diary.kinds == ["end"]


class Raising(Callback):
    """Fails where it is told to."""

    def __init__(self, where: str):
        self._where = where

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_where"):
            raise ValueError(f"{name} fails")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("where", ["on_start", "on_step", "on_evaluate"])
def test_an_exception_of_one_ends_the_run_and_the_others_hear_of_it(tmp_path: Path, where: str) -> None:
    diary = Diary()
    with pytest.raises(ValueError, match=f"{where} fails"):
        train(load_recipe(write_recipe(tmp_path)), tmp_path / "run", callbacks=[Raising(where), diary], say=silent)
    assert diary.told[-1] == ("end", f"{where} fails")


def own_loop(recipe: Path, **options: Any) -> Engine:
    model = tiny_llama()
    with Engine.from_recipe(recipe, **options) as engine:
        _, _, loader = engine.prepare(model, two_groups(model), [batch(index) for index in range(4)])
        for window in loader:
            engine.step(window)
        engine.save()
    return engine


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    schedule = {"name": "constant", "warmup_steps": 0}
    return write_recipe(tmp_path, train={"schedule": schedule}, shard={"micro_batch": 2})


def test_they_hear_of_a_users_own_loop(recipe: Path) -> None:
    diary = Diary()
    own_loop(recipe, callbacks=[diary])
    assert diary.kinds == ["start", "step", "step", "end"]
    assert [result.step for kind, result in diary.told if kind == "step"] == [1, 2]


def test_a_users_own_loop_has_a_directory_too(recipe: Path, tmp_path: Path) -> None:
    """Named after the recipe, the first that is free, as the command does; or the one that is given."""
    own_loop(recipe)
    own_loop(recipe)
    own_loop(recipe, output="elsewhere", overrides=["train.trackers=[tensorboard]"])
    models = ["runs/recipe/model", "runs/recipe-2/model", "elsewhere/model"]
    assert all((tmp_path / model / "model.safetensors").is_file() for model in models)
    assert len(list((tmp_path / "elsewhere/tracking/tensorboard").glob("events.*"))) == 1


def test_an_engine_without_a_model_says_so(recipe: Path) -> None:
    with Engine.from_recipe(recipe) as engine, pytest.raises(RuntimeError, match="no model yet"):
        engine.evaluate([])


def test_every_rank_is_told_the_same(pools: Pools, tmp_path: Path, recipe: Path) -> None:
    first, second = pools.run(2, "tests.train.jobs", "diary", recipe=recipe, output=tmp_path / "run")
    assert first == second
    assert [kind for kind, *_ in first] == ["start", "step", "step", "step", "evaluate", "end"]
