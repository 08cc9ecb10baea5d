"""Each benchmark at its smallest setting: that it runs, and reports in the form. Figures are not looked at."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]
FORM = {"title", "hardware", "versions", "command", "load", "rows", "targets", "notes"}


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "bench" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=580)


def report(script: str, *arguments: str) -> dict[str, Any]:
    done = run(script, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == FORM
    return result


@pytest.mark.slow
def test_memory_by_backend() -> None:
    result = report("memory_by_backend.py", "--size", "tiny", "--sequence", "32", "--backends", "fsdp")
    *peers, ours = result["rows"]
    assert ours[""] == "shardlab fsdp"
    losses = [row["loss"] for row in peers]
    assert max(losses) - min(losses) < 1e-4  # they differ in their optimizer's kernel only
    assert all(row["peak MiB"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_memory() -> None:
    only = ("--only", "FSDP2, as users run it", "--only", "shardlab fsdp")
    result = report("memory.py", "--size", "tiny", "--vocabulary", "512", "--sequence", "32", *only)
    theirs, ours, away = result["rows"]
    assert [row["cell"].partition(": ")[2] for row in (theirs, ours, away)] == [
        "FSDP2, as users run it",
        "shardlab fsdp",
        "shardlab fsdp, activations on the disk",
    ]
    assert ours["loss"] == away["loss"] == pytest.approx(theirs["loss"], abs=0.1)  # other initial weights
    (target,) = result["targets"]
    assert target["value"] == pytest.approx(ours["peak MiB"] / theirs["peak MiB"])


@pytest.mark.slow
def test_plan_accuracy() -> None:
    (row,) = report("plan_accuracy.py", "--size", "tiny")["rows"]
    assert row["cell"] == "tiny ddp x1 fp32 1 x 1"
    assert 0 < row["tensors"] < row["middle"]
    assert row["measured"] > 0


@pytest.mark.slow
def test_cost_accuracy() -> None:
    (row,) = report("cost_accuracy.py", "--size", "tiny", "--steps", "3")["rows"]
    assert row["cell"] == "tiny ddp x1 fp32 1 x 1"
    assert row["predicted / measured"] == pytest.approx(row["predicted s"] / row["measured s"])


def test_rows_that_are_kept_are_not_measured_again(tmp_path: Path) -> None:
    """A figure that no run gives comes from the file."""
    row = {"cell": "tiny ddp x1 fp32 1 x 1", "measured s": 2.0, "predicted s": 3.0, "predicted / measured": 1.5}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**row, "load": 0.0, "rates": "another machine's"}) + "\n")
    result = report("cost_accuracy.py", "--size", "tiny", "--results", str(file))
    assert [found["measured s"] for found in result["rows"]] == [2.0]
    assert "predicted by other rates: tiny ddp x1 fp32 1 x 1" in result["notes"]


def test_attention() -> None:
    result = report("attention.py", "--rounds", "1", "--shapes", "4 x 4 x 256 x 64")
    assert len(result["rows"]) == 4
    assert all(row["tiles ms"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_overhead() -> None:
    result = report("overhead.py", "--models", "tiny", "--precisions", "fp32", "--rounds", "1", "--block", "1")
    losses = {row["contestant"]: row["loss"] for row in result["rows"]}
    # The same weights, batches and rates: a difference would mean that they don't do the same work.
    assert losses["shardlab Engine in a loop"] == pytest.approx(losses["Accelerate loop"], abs=1e-5)
    assert len(result["targets"]) == 2


@pytest.mark.slow
def test_stream() -> None:
    parts = ("--only", "memory", "--only", "deepspeed", "--tokens", "512")
    result = report("stream.py", "--size", "tiny", "--steps", "1", "--threads", "1", *parts)
    memory, recompute, stream = result["rows"][:3]
    assert stream["loss"] == pytest.approx(memory["loss"], abs=1e-3)
    assert recompute["loss"] == pytest.approx(memory["loss"], abs=1e-3)
    assert stream["GB read"] > stream["GB written"] > 0
    assert stream["floor s"] >= memory["floor s"] > 0
    assert len(result["rows"]) == 7 or any("libaio" in note for note in result["notes"])


@pytest.mark.slow
def test_train_speed(tmp_path: Path) -> None:
    results = tmp_path / "kept" / "turns.jsonl"
    own = ("--only", "fp32 2 x 512, 1 rank", "--names", "shardlab train, tiles", "HF Trainer")
    options = ("--model", "tiny", "--rounds", "1", "--block", "1", "--results", str(results))
    result = report("train_speed.py", *options, *own)
    assert [row["contestant"] for row in result["rows"]] == ["shardlab train, tiles", "HF Trainer"]
    assert all(0 < row["of bound"] < 1 for row in result["rows"])
    assert len(results.read_text().splitlines()) == 2  # a later run adds to them
    assert len(result["targets"]) == 2


@pytest.mark.slow
def test_scaling(tmp_path: Path) -> None:
    options = ("--size", "tiny", "--names", "shardlab train", "--results", str(tmp_path / "turns.jsonl"))
    rows = report("scaling.py", *options)["rows"]
    assert [row["point"] for row in rows] == ["16", "32", "64"]
    first, second, third = (row["peak MiB"] for row in rows)
    assert third / rows[2]["MiB of line"] == pytest.approx(first + (second - first) * 3)


@pytest.mark.slow
def test_sharding_cost(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--precisions", "fp32", "--rounds", "1", "--block", "1")
    names = ("--names", "ddp", "fsdp", "fsdp through gloo", "--results", str(tmp_path / "turns.jsonl"))
    rows = report("sharding_cost.py", *options, *names)["rows"]
    assert [row["contestant"] for row in rows] == ["shardlab ddp", "shardlab fsdp", "shardlab fsdp through gloo"]
    assert rows[1]["loss"] == rows[2]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-5)


@pytest.mark.slow
def test_shakespeare(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {number}: to be, or not to be.\n" for number in range(400)))
    result = report("shakespeare.py", "--data", str(text), "--steps", "3", "--threads", "1")
    peer, ours = (row["validation loss"] for row in result["rows"])
    assert 3 < peer < 5  # near the logarithm of the vocabulary: 65 characters or fewer, and 257 bytes
    assert 3 < ours < 6


@pytest.mark.slow
def test_checkpoint(tmp_path: Path) -> None:
    options = ("--size", "tiny", "--rounds", "1", "--micro-batches", "1", "--directory", str(tmp_path))
    result = report("checkpoint.py", *options)
    names = ["shardlab fsdp", "DCP (fsdp)", "dd with fsync", "shardlab zero2", "DeepSpeed (zero2)", "dd with fsync"]
    assert [row[""] for row in result["rows"]] == names
    assert all(row["save s"] > 0 and row["MiB"] > 8 for row in result["rows"])
    assert len(result["targets"]) == 8
    assert list(tmp_path.iterdir()) == []


def test_shakespeare_says_in_one_line_that_the_text_is_missing(tmp_path: Path) -> None:
    done = run("shakespeare.py", "--data", str(tmp_path / "no.txt"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no.txt" in done.stderr


@pytest.mark.slow
def test_distill() -> None:
    steps = (
        "--teacher-steps",
        "4",
        "--steps",
        "2",
        "--rows",
        "2",
        "--sequence",
        "32",
        "--held-out",
        "4",
        "--seeds",
        "1",
    )
    (row,) = report("distill.py", "--size", "tiny", "--tokenizer", "bytes", *steps)["rows"]
    assert row["with"] > 1
    assert row["with / without"] == pytest.approx(row["with"] / row["without"])


@pytest.mark.slow
def test_the_distillation_s_loss_is_the_same_in_chunks() -> None:
    ours, whole = report("distill.py", "--loss-memory", "--turns", "1", "--tokens", "512")["rows"]
    assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert ours["extra peak MiB"] < whole["extra peak MiB"]


@pytest.mark.slow
def test_compress(tmp_path: Path) -> None:
    from tests.export.models import bpe_tokenizer, save_model

    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320, max_position_embeddings=256)
    small = ("--model", str(tmp_path / "model"), "--rows", "2", "--calibration", "4", "--ways", "int4g32")
    small += ("--directory", str(tmp_path / "made"))
    result = report("compress.py", *small)
    assert [row["cell"] for row in result["rows"]] == ["int4g32 rtn", "int4g32 gptq"]
    assert all(row["KL"] > 0 for row in result["rows"])
    assert "gzip -9" in result["notes"][0]
    assert "effective rank" in result["notes"][1]
    quick = report("compress.py", *small, "--only", "speed")
    assert [row["cell"] for row in quick["rows"]] == ["as it was", "int4g32 rtn", "int4g32 gptq"]


def test_the_effective_rank_of_equal_and_of_lone_directions() -> None:
    import torch

    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from compress_text import effective_rank
    finally:
        sys.path.pop(0)
    assert effective_rank(torch.eye(8)) == pytest.approx(8)
    lone = torch.zeros(8, 8)
    lone[2, 2] = 3.0
    assert effective_rank(lone) == pytest.approx(1)
