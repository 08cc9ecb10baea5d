"""`train.qat`: on every backend the training computes with the numbers that `shardlab quantize` makes afterwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.stage import Rows, read_rows
from shardlab.data.tokenizer import make_tokenizer
from shardlab.recipe import DataSection
from tests.distributed.pool import Pools
from tests.train.loop import tiny_llama
from tests.train.support import losses, shardlab, write_recipe

QAT = {"scheme": "int3", "group_size": 16, "local": ["*.down_proj=int4"]}
CONFIG = QuantizeConfig("int3", group_size=16, local=("*.down_proj=int4",), method="rtn")
LENGTH = 32


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, steps=5)


def write(directory: Path, *, steps: int) -> Path:
    """To train on from a model that is there, so that rounding has something to lose."""
    model: nn.Module = tiny_llama()
    model.save_pretrained(directory / "start")  # type: ignore[operator]
    train = {"steps": steps, "optimizer": {"lr": 3e-3}, "qat": QAT}
    return write_recipe(directory, model={"path": str(directory / "start")}, train=train, shard={"micro_batch": 2})


def rows_of(directory: Path) -> Rows:
    make_tokenizer("bytes", None, Path()).save_pretrained(directory / "tokenizer")  # type: ignore[arg-type]
    data = DataSection(
        files=(str(directory / "text.txt"),),
        tokenizer=str(directory / "tokenizer"),
        sequence_length=LENGTH,
        evaluation_fraction=0.1,
    )
    return read_rows(data, calibration=2, held_out=32)


def quantized(directory: Path, rows: Rows, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers reads, after the same rounding."""
    quantize(directory, directory.with_name(f"{directory.name}-small"), CONFIG, rows, LENGTH, lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(directory.with_name(f"{directory.name}-small"), dtype=dtype)
    with torch.no_grad():
        model(torch.arange(4)[None])  # what is packed is unpacked by the first call
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("backend", "precision", "recompute"),
    [
        ("ddp", "fp32", "selective"),
        ("fsdp", "bf16", "none"),
        ("zero1", "fp32", "none"),
        ("zero2", "bf16", "full"),
        ("zero3", "fp32", "none"),
        ("zero3", "bf16", "full"),
    ],
)
def test_what_the_training_saw_is_what_quantize_makes(
    pools: Pools, recipe: Path, tmp_path: Path, backend: str, precision: str, recompute: str
) -> None:
    given = [f"shard.backend={backend}", f"train.precision={precision}", f"shard.recompute={recompute}"]
    outcomes = pools.run(
        2, "tests.train.jobs", "rounded_steps", recipe=recipe, overrides=given, directory=tmp_path / "model"
    )
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    weights = quantized(tmp_path / "model", rows_of(tmp_path), dtype)
    for _, seen in outcomes:
        assert len(seen) == 14
        for name, value in seen.items():
            assert np.array_equal(value, weights[name].detach().float().numpy()), name
    if precision == "fp32":
        ended = shardlab("train", recipe, "--output", tmp_path / "alone", "--set", "shard.backend=ddp")
        assert ended.code == 0, ended.err
        assert outcomes[0][0] == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_backend_stream_trains_the_same_and_the_command_is_said(recipe: Path, tmp_path: Path) -> None:
    for backend in ("ddp", "stream"):
        ended = shardlab("train", recipe, "--output", tmp_path / backend, "--set", f"shard.backend={backend}")
        assert ended.code == 0, ended.err
    assert losses(tmp_path / "stream") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-5)
    command = "OUT --method rtn --scheme int3 --group-size 16 --local '*.down_proj=int4'"
    assert f"shardlab quantize {tmp_path / 'stream' / 'model'} {command}" in ended.out


def test_it_costs_less_than_rounding_afterwards(tmp_path: Path) -> None:
    """The same steps with and without; both then rounded alike, judged on held-out rows."""
    recipe, after = write(tmp_path, steps=60), []
    rows = rows_of(tmp_path)
    for name, given in (("with", []), ("without", ["--set", "train.qat=null"])):
        ended = shardlab("train", recipe, "--output", tmp_path / name, *given)
        assert ended.code == 0, ended.err
        card = quantize(tmp_path / name / "model", tmp_path / f"{name}-small", CONFIG, rows, LENGTH, lambda _: None)
        after.append(card.figures["loss"]["after"])
    assert after[0] < after[1]


def test_adapters_and_rounding_exclude_each_other(recipe: Path, tmp_path: Path) -> None:
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", "model.lora={rank: 2}")
    assert "model.lora freezes them" in ended.error
