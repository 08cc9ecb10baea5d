"""A teacher that speaks once: `distill.cache` is written, read, resumed and refused; the run is the same by it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardlab.backends.stream import layout
from shardlab.data import teacher_cache
from shardlab.data.packing import PackedRows
from shardlab.data.prepare import prepare_data
from shardlab.recipe import load_recipe
from tests.distributed.pool import Pools
from tests.train.support import COMMAND, REPOSITORY, Ended, losses, shardlab
from tests.train.test_distill import make_teacher, recipe_of, refused

KEPT = 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teachers") / "teacher")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "SHARD_TOKENS", 4 * 32)  # of four rows


def cached(directory: Path, teacher: Path, **distill: Any) -> Path:
    """A recipe whose run reads 12 of some 150 rows."""
    given = {"cache": str(directory / "said"), "cache_top_k": KEPT, "weight": 0.5, "temperature": 2.0, **distill}
    return recipe_of(directory, teacher, **given)


def go(recipe: Path, output: Path, *arguments: str) -> Ended:
    ended = shardlab("train", recipe, "--output", output, *arguments)
    assert ended.code == 0, ended.err
    return ended


def shards(directory: Path) -> list[Path]:
    return sorted((directory / "said").glob("*.safetensors"))


def test_what_is_kept_is_what_the_teacher_says_of_each_row(teacher: Path, tmp_path: Path) -> None:
    """Of whole logits, by transformers; packed rows hold several documents."""
    recipe = cached(tmp_path, teacher)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(json.dumps({"text": part * 3}) for part in text.read_text().split()))
    text = text.rename(tmp_path / "text.jsonl")
    files = f"--set=data.files=[{text}]"
    said = go(recipe, tmp_path / "run", files).out
    assert "from its 8 likeliest tokens and the share of the rest" in said
    assert f"the teacher speaks of 12 rows of 32: 0.0 MiB in {tmp_path / 'said'}" in said
    assert len(shards(tmp_path)) == 3
    data = prepare_data(load_recipe(recipe, [files.removeprefix("--set=")]).data)
    assert isinstance(data.train, PackedRows)
    stored = json.loads((tmp_path / "said" / "cache.json").read_text())
    cache = teacher_cache.TeacherCache(tmp_path / "said", teacher_cache.CacheIdentity(**stored))
    cache.look()
    rows = teacher_cache.rows_of_run(12, len(data.train), 0)
    assert not len(cache.missing(rows))
    assert len(cache.missing(np.arange(len(data.train)))) == len(data.train) - 12
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    for row in rows.tolist():
        batch = data.train.batch([row])
        assert int((batch["position_ids"] == 0).sum()) > 1
        batch.pop("targets")
        with torch.no_grad():
            expected = (model(**batch, use_cache=False).logits[0].double() / 2).softmax(-1)
        ids, shares, rest = cache.read([row]).values()
        shares, rest = shares[0].view(torch.float16).double().exp(), rest[0].view(torch.float32).double().exp()
        torch.testing.assert_close(shares, expected.gather(1, ids[0].long()), rtol=6e-3, atol=1e-6)
        torch.testing.assert_close(shares, expected.topk(KEPT).values, rtol=6e-3, atol=1e-6)
        left = expected.scatter(1, ids[0].long(), 0).sum(1)
        torch.testing.assert_close(rest, left, rtol=1e-4, atol=1e-7)
    filler = cache.read([-1, int(rows[0])])
    assert not any(one[0].any() for one in filler.values())
    with pytest.raises(KeyError, match="is not in"):
        cache.read([next(row for row in range(len(data.train)) if row not in rows)])


def test_with_every_token_kept_it_is_the_run_with_the_teacher_beside(teacher: Path, tmp_path: Path) -> None:
    """But for the cache's fp16; and no teacher is planned for, or in memory."""
    recipe = cached(tmp_path, teacher, cache_top_k=1000)
    go(recipe, tmp_path / "kept")
    go(recipe, tmp_path / "beside", "--set=distill.cache=null")
    assert losses(tmp_path / "kept") == pytest.approx(losses(tmp_path / "beside"), rel=1e-3)
    assert losses(tmp_path / "kept") != losses(tmp_path / "beside")
    plans = [json.loads((tmp_path / run / "plan.json").read_text()) for run in ("kept", "beside")]
    kept, beside = (plan["predicted_memory_bytes"]["by_kind"]["parameters"] for plan in plans)
    weights = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(teacher).parameters())
    assert beside - kept == 4 * weights
    planned = shardlab("plan", recipe, "--json")
    assert planned.code == 0, planned.err


@pytest.mark.parametrize("least", [1000, layout.LEAST_ROWS_ELEMENTS], ids=["head by rows", "whole head"])
def test_stream_trains_the_run_of_memory(
    teacher: Path, tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LEAST_ROWS_ELEMENTS", least)
    recipe = cached(tmp_path, teacher)
    go(recipe, tmp_path / "alone")
    go(recipe, tmp_path / "stream", "--set=shard.backend=stream")
    assert losses(tmp_path / "stream") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    ours, theirs = ((tmp_path / run / "summary.json").read_text() for run in ("stream", "alone"))
    assert json.loads(ours)["evaluation_loss"] == pytest.approx(json.loads(theirs)["evaluation_loss"], rel=1e-5)


def test_two_ranks_train_the_run_of_one(pools: Pools, teacher: Path, tmp_path: Path) -> None:
    """By the same rows: the second run writes nothing."""
    recipe = cached(tmp_path, teacher)
    assert "the teacher speaks of 12 rows" in go(recipe, tmp_path / "alone").out
    written = {file: file.stat().st_mtime_ns for file in shards(tmp_path)}
    recipe.write_text(recipe.read_text().replace("shard: {}", "shard: {backend: fsdp}"))
    pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=tmp_path / "together")
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert {file: file.stat().st_mtime_ns for file in shards(tmp_path)} == written


def test_two_ranks_write_the_cache_of_one(pools: Pools, teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    recipe.write_text(recipe.read_text().replace("shard: {}", "shard: {backend: zero2}"))
    pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=tmp_path / "together")
    (tmp_path / "said").rename(tmp_path / "their words")
    go(recipe, tmp_path / "alone", "--set=shard.backend=ddp")
    data = prepare_data(load_recipe(recipe).data)
    found = []
    for directory in ("said", "their words"):
        stored = json.loads((tmp_path / directory / "cache.json").read_text())
        cache = teacher_cache.TeacherCache(tmp_path / directory, teacher_cache.CacheIdentity(**stored))
        cache.look()
        found.append(cache.read(teacher_cache.rows_of_run(12, len(data.train), 0)))
    assert all(torch.equal(one, other) for one, other in zip(found[0].values(), found[1].values(), strict=True))
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_a_longer_run_adds_rows_and_another_order_reads_the_same(teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    go(recipe, tmp_path / "short")
    first = shards(tmp_path)
    said = go(recipe, tmp_path / "long", "--set=train.steps=5").out
    assert "the teacher speaks of 8 rows" in said
    assert set(first) < set(shards(tmp_path))
    everything = len(prepare_data(load_recipe(recipe).data).train)
    rows = teacher_cache.rows_of_run(20, everything, 3)
    new = len(np.setdiff1d(rows, teacher_cache.rows_of_run(20, everything, 0)))
    said = go(recipe, tmp_path / "other", "--set=train.steps=5", "--set=train.seed=3").out
    assert 0 < new < 20
    assert f"the teacher speaks of {new} rows" in said


def test_a_damaged_shard_is_written_anew(teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    go(recipe, tmp_path / "first")
    before = [file.read_bytes() for file in shards(tmp_path)]
    file = shards(tmp_path)[1]
    file.write_bytes(before[1][:-9] + b"x" + before[1][-8:])
    said = go(recipe, tmp_path / "second").out
    assert f"{file} is damaged: its rows are written anew" in said
    assert "the teacher speaks of 4 rows" in said
    assert [file.read_bytes() for file in shards(tmp_path)] == before
    assert losses(tmp_path / "second") == losses(tmp_path / "first")


def test_a_killed_writer_leaves_whole_shards_and_the_same_command_goes_on(teacher: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of the writing; no shard is made twice, and no half of one has its name."""
    recipe = cached(tmp_path, teacher)
    steps = "--set=train.steps=30"  # 120 rows
    program = (
        "import time\nfrom shardlab.data import teacher_cache as t\nt.SHARD_TOKENS = 128\nput = t.TeacherCache.put\n"
        "def slow(self, rows, said):\n    time.sleep(0.3)\n    return put(self, rows, said)\n"
        "t.TeacherCache.put = slow\nfrom shardlab.cli import main\nmain()"
    )
    command = [COMMAND[0], "-c", program, "train", str(recipe), "--output", str(tmp_path / "run"), steps]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, env=dict(os.environ))
    while len(shards(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = {file: file.stat().st_ino for file in shards(tmp_path)}
    assert 3 <= len(left) < 30
    assert teacher_cache.damaged(left) == []
    (tmp_path / "said" / "000000099-x.safetensors.partial").write_bytes(b"half")
    said = go(recipe, tmp_path / "run", steps).out  # nothing was written to the run's directory yet
    assert f"the teacher speaks of {120 - 4 * len(left)} rows" in said
    assert {file: file.stat().st_ino for file in shards(tmp_path) if file in left} == left
    assert not list((tmp_path / "said").glob("*.partial"))


def test_a_cache_of_something_else_is_refused(teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    go(recipe, tmp_path / "run")
    where = f"distill.cache: {tmp_path / 'said'} was written for "
    other = make_teacher(tmp_path / "other", rows=320)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(other)
    changes = {
        f"distill.teacher={other}": "another teacher (its weights or config differ);",
        "data.evaluation_fraction=0.2": "another text, tokenizer or split;",
        "distill.temperature=1.0": "distill.temperature: 2.0 there, 1.0 here",
        "distill.cache_top_k=9": "distill.cache_top_k: 8 there, 9 here",
    }
    for change, said in changes.items():
        assert where + said in refused(recipe, tmp_path / "no", "--set", change)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    assert "is no cache, and not empty" in refused(recipe, tmp_path / "no", f"--set=distill.cache={tmp_path / 'notes'}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("distill.loss=reverse_kl", "with cache the loss is forward_kl or skew_kl"),
        ("distill.loss=jsd", "with cache the loss is forward_kl or skew_kl"),
        ("data.streaming=true", "streamed text has no rows to keep scores by"),
        ("distill.cache_top_k=0", "distill.cache_top_k"),
    ],
)
def test_what_is_refused(teacher: Path, tmp_path: Path, change: str, said: str) -> None:
    recipe = cached(tmp_path, teacher)
    recipe.write_text(recipe.read_text().replace("evaluation_fraction: 0.1", "evaluation_fraction: 0"))
    assert said in refused(recipe, tmp_path / "run", "--set", change)
    assert not (tmp_path / "said").exists()


def test_another_run_that_writes_is_not_written_beside(teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    go(recipe, tmp_path / "first")
    stored = json.loads((tmp_path / "said" / "cache.json").read_text())
    cache = teacher_cache.TeacherCache(tmp_path / "said", teacher_cache.CacheIdentity(**stored))
    with cache.writing():
        assert "another run is writing" in refused(recipe, tmp_path / "run", "--set=train.steps=5")
        go(recipe, tmp_path / "reads")


def test_a_full_disk_ends_in_one_line(teacher: Path, tmp_path: Path) -> None:
    recipe = cached(tmp_path, teacher)
    with mock.patch.object(teacher_cache.os, "fsync", side_effect=OSError(28, "No space left on device")):
        ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.error == f"distill.cache: {tmp_path / 'said'} can't be written: No space left on device"
    assert not shards(tmp_path)
