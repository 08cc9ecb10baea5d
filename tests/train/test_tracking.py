"""Experiment trackers: their own readers find the recipe and every row of the metrics in their files."""

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlab.planner import resolve
from shardlab.recipe import Recipe
from shardlab.train import tracking
from tests.distributed.pool import Pools
from tests.train.support import Ended, metrics, shardlab, write_recipe

ENVIRONMENT = ("WANDB_MODE", "WANDB_DIR", "WANDB_NAME", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_NAME")
Curves = dict[str, list[tuple[int, float]]]  # key -> (step, value)


@pytest.fixture(autouse=True)
def _no_tracker_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "240")  # seconds for its own process to start, instead of 30


@pytest.fixture(params=["tensorboard", "wandb", "mlflow"])
def tracker(request: pytest.FixtureRequest) -> str:
    package = {"mlflow": "mlflow-skinny"}.get(request.param, request.param)
    pytest.importorskip(request.param, reason=f"needs `pip install {package}`")
    return str(request.param)


def track(directory: Path, name: str, **sections: Any) -> tuple[Path, Ended]:
    train = {"trackers": [name], "evaluate_every": 2, **sections.pop("train", {})}
    recipe = write_recipe(directory, train=train, **sections)
    return directory / "run", shardlab("train", recipe, "--output", directory / "run")


def expected_curves(run: Path) -> Curves:
    curves: Curves = {}
    for row in metrics(run):
        for key, value in row.items():
            if key != "step" and value is not None:
                curves.setdefault(key, []).append((row["step"], float(value)))
    return curves


def assert_same(found: Curves, expected: Curves, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, points in expected.items():
        assert [step for step, _ in found[key]] == [step for step, _ in points]
        values = [value for _, value in points]
        assert [value for _, value in found[key]] == pytest.approx(values, rel=tolerance, nan_ok=True), key


def test_every_row_and_the_recipe_are_in_its_files(tracker: str, tmp_path: Path) -> None:
    run, ended = track(tmp_path, tracker)
    assert ended.code == 0, ended.err
    curves, values, finished = READERS[tracker](run / "tracking")
    assert {"loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes", "evaluation_loss"} <= curves.keys()
    assert_same(curves, expected_curves(run), 1e-6 if tracker == "tensorboard" else 0.0)  # whose scalars are fp32
    assert values["train.optimizer.lr"] == pytest.approx(1e-3)
    assert values["train.steps"] == 3
    assert values["model.preset"] == "tiny"
    assert values["plan.backend"] == "ddp"
    assert finished


def test_a_run_that_fails_has_its_last_row_and_is_ended(tracker: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/6702: the curve looked healthy while the loss was NaN."""
    model = {"builder": "tests.train.builders:nan_at_step_3"}
    run, ended = track(tmp_path, tracker, model=model, train={"evaluate_every": None})
    assert "step 3: loss nan" in ended.error
    curves, _, finished = READERS[tracker](run / "tracking")
    assert [step for step, _ in curves["loss"]] == [1, 2, 3]
    assert math.isnan(curves["loss"][-1][1])
    assert not finished or tracker == "tensorboard"  # which knows no state of a run


def test_only_the_first_rank_tracks(pools: Pools, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train={"trackers": ["tensorboard"]}, shard={"micro_batch": 1})
    pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=tmp_path / "run")
    assert len(list((tmp_path / "run/tracking/tensorboard").glob("events.*"))) == 1
    curves, _, _ = read_tensorboard(tmp_path / "run/tracking")
    assert [step for step, _ in curves["loss"]] == [1, 2, 3]


def test_a_tracker_that_is_not_installed_is_one_line_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracking._MODULES, "wandb", ("no_such_module",))
    run, ended = track(tmp_path, "wandb")
    assert ended.error.startswith("train.trackers: wandb is not installed: `pip install wandb`")
    assert not run.exists()
    assert not (tmp_path / "cache").exists(), "nothing was tokenised"


def test_the_users_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run, ended = track(tmp_path, "wandb")
    assert ended.code == 0, ended.err
    assert list((run / "tracking").iterdir()) == []


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    _, ended = track(tmp_path, "wandb")
    assert ended.error.startswith("train.trackers: wandb does not start: No API key")


def test_the_configuration_is_numbers_and_strings_by_dotted_key() -> None:
    recipe = Recipe.from_dict({"train": {"trackers": ["tensorboard"], "clip_grad_norm": None}})
    values = tracking.configuration(recipe, resolve(recipe, world_size=2))
    assert values["train.clip_grad_norm"] == "null"
    assert values["train.optimizer.betas"] == "[0.9, 0.95]"
    assert (values["plan.backend"], values["plan.world_size"], values["shard.backend"]) == ("fsdp", 2, "auto")
    assert all(isinstance(value, bool | int | float | str) for value in values.values())


def read_tensorboard(directory: Path) -> tuple[Curves, dict[str, Any], bool]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    curves = {key: [(e.step, e.value) for e in events.Scalars(key)] for key in events.Tags()["scalars"]}
    values: dict[str, Any] = {}
    for folder in (directory / "tensorboard").iterdir():
        if not any(folder.glob("events.*")) if folder.is_dir() else True:
            continue
        inner = EventAccumulator(str(folder))
        inner.Reload()
        content = inner.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        info = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        values |= {key: getattr(value, value.WhichOneof("kind")) for key, value in info.hparams.items()}
    return curves, values, True


def read_wandb(directory: Path) -> tuple[Curves, dict[str, Any], bool]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while True:  # a process of wandb's own writes it, and may close it after finish() has returned
        found = [Record.FromString(content) for content in records(file.read_bytes())]
        if any(record.HasField("exit") for record in found):
            break
        assert time.monotonic() < deadline, "wandb never wrote the end of the run"
        time.sleep(0.1)
    curves: Curves = {}
    values: dict[str, Any] = {}
    code = None
    for record in found:
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.get("_step", record.history.step.num)
            for key, value in row.items():
                if not key.startswith("_"):
                    curves.setdefault(key, []).append((step, float(value)))
        updates = [*record.run.config.update, *record.config.update]
        values |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
        code = record.exit.exit_code if record.HasField("exit") else code
    return curves, values, code == 0


def records(content: bytes) -> Iterator[bytes]:
    """Those of a LevelDB log, in blocks of 32 KiB: checksum, length, and kind (whole, first, middle or last part).

    The last one may still be being written, and is left out then.
    """
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if len(content) < at + 7 + length:
            break
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def read_mlflow(directory: Path) -> tuple[Curves, dict[str, Any], bool]:
    from mlflow import MlflowClient

    client = MlflowClient((directory / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'shardlab'")
    (run,) = client.search_runs([experiment.experiment_id])
    curves = {
        key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    values = {key: _number(value) for key, value in run.data.params.items()}
    assert run.info.run_name == "run"
    return curves, values, run.info.status == "FINISHED"


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
