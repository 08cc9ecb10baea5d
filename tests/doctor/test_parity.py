"""Two configurations run for real, on two ranks: the same where they are, and named where they are not."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlab.doctor import parity
from shardlab.doctor.configuration import Configuration, Setting
from shardlab.doctor.parity import _comparable, compare
from shardlab.doctor.ranks import Ended
from shardlab.doctor.verdict import judge
from shardlab.errors import UserError
from tests.distributed.pool import Pools

RECIPE = "train: {precision: fp32, global_batch_size: 8}\nshard: {backend: fsdp, micro_batch: 1}\n"
FSDP = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\nfsdp_config: {fsdp_version: 2}\n"


def write(directory: Path, **files: Any) -> list[Path]:
    """Files by name; a mapping is a ds_config, a string YAML."""
    paths = []
    for name, content in files.items():
        path = directory / f"{name}.{'yaml' if isinstance(content, str) else 'json'}"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(path)
    return paths


def ds_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    } | changes


@pytest.fixture
def ranks_of_the_pool(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a launcher and ranks that import everything, which the tests without it have."""

    class Job:
        def __init__(self, module: str, arguments: list[str], *, nproc: int, timeout_seconds: float):
            self._job = {"program": module, "given": arguments}
            self._nproc = nproc

        def wait(self) -> Ended:
            pools.run(self._nproc, "tests.distributed.programs", "main_of", **self._job)
            return Ended(0, "")

    monkeypatch.setattr(parity, "RankJob", lambda *given, **named: nullcontext(Job(*given, **named)))


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_recipe_and_a_ds_config_that_say_the_same(tmp_path: Path) -> None:
    """FSDP2 with micro-batch 1 beside ZeRO-3 with micro-batch 2, each with the same AdamW.

    DeepSpeed's own clipping at 1.0, which its file does not mention, is the recipe's.
    """
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    verdict = compare(*write(tmp_path, recipe=RECIPE, ds=ds_config(optimizer=adamw)))
    assert verdict.same, verdict.lines()
    assert verdict.figures["largest"]["loss"] < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_the_pool")
def test_deepspeeds_default_clipping_beside_fsdp_without(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8068: losses and norms agree, and the weights go their own ways."""
    verdict = compare(*write(tmp_path, fsdp=FSDP, ds=ds_config()))
    assert not verdict.same
    first, *settings = verdict.lines()
    assert first.startswith(
        "NOT the same: step 0 with plain SGD: loss and gradient norm agree, but model.embed_tokens."
    )
    (clipping,) = settings
    assert "off (accelerate with FSDP leaves it to the script" in clipping
    assert "1 (DeepSpeed's default, for there is no gradient_clipping)" in clipping


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_the_pool")
def test_a_model_of_another_family_and_two_precisions(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1}
    other = ds_config(bf16={"enabled": True}, gradient_clipping=1.0)
    verdict = compare(*write(tmp_path, recipe=RECIPE, ds=other), gpt2)
    assert not verdict.same
    assert any("precision: fp32 (train.precision)" in line for line in verdict.lines())


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_what_deepspeed_refuses_is_blamed_on_its_file(tmp_path: Path) -> None:
    recipe, ds = write(tmp_path, recipe=RECIPE, ds=ds_config(zero_optimization={"stage": 2, "no_such_key": 1}))
    with pytest.raises(UserError, match="no_such_key") as raised:
        compare(recipe, ds)
    assert str(ds) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_batches_that_differ_need_no_run(tmp_path: Path) -> None:
    verdict = compare(*write(tmp_path, recipe=RECIPE, ds=ds_config(train_batch_size=12)))
    assert not verdict.same
    assert "a step is 8 sequences" in verdict.what


# The verdict on made-up runs.


def run(directory: Path, number: int, side: int, **changes: Any) -> None:
    """Two steps of a model of two tensors."""
    values = {
        "before/a": np.ones(4), "0/a": np.full(4, 0.9), "1/a": np.full(4, 0.8),
        "before/b": np.ones(3), "0/b": np.full(3, 0.5), "1/b": np.full(3, 0.2),
        "losses": np.array([4.0, 3.0]), "norms": np.array([5.0, 4.0]),
    }  # fmt: skip
    np.savez(directory / f"{number}-{side}.npz", **(values | changes))


SIDES = (
    Configuration("x", "plan", "fp32", clip_grad_norm=1.0, settings={"clipping": Setting("1")}),
    Configuration("y", "plan", "fp32", clip_grad_norm=1.0, settings={"clipping": Setting("2")}),
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"losses": np.array([4.0, 3.001])}, "step 1 with plain SGD: the loss is 3 and 3.001"),
        ({"losses": np.array([np.nan, 3.0])}, "step 0 with plain SGD: the loss is 4 and nan"),
        ({"norms": np.array([5.0, 8.0])}, "step 1 with plain SGD: the gradient norm is 4 and 8"),
        ({"1/b": np.full(3, 0.35)}, "step 1 with plain SGD: loss and gradient norm agree, but b moves by"),
        ({"0/a": np.full(4, 0.91), "0/b": np.full(3, 0.6)}, "but a moves by"),
    ],
)
def test_the_first_step_and_tensor_that_differ_are_named(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    run(tmp_path, 0, 0)
    run(tmp_path, 0, 1, **changes)
    verdict = judge(tmp_path, SIDES, ["plain SGD"], 2)
    assert not verdict.same
    assert found in verdict.what
    assert verdict.lines()[1] == "  clipping: 1 in x, 2 in y"


def test_elements_without_a_gradient_do_not_count_after_adam(tmp_path: Path) -> None:
    """Adam moves an element whose gradient is rounding alone as far as any other, in either direction."""
    key_bias = {"before/k": np.zeros(2), "0/k": np.full(2, 1e-9), "1/k": np.full(2, 2e-9)}
    for side in (0, 1):
        run(tmp_path, 0, side, **key_bias)
    run(tmp_path, 1, 0, **key_bias | {"0/k": np.full(2, 1e-3)})
    run(tmp_path, 1, 1, **key_bias | {"0/k": np.full(2, -1e-3)})
    assert judge(tmp_path, SIDES, ["plain SGD", "AdamW"], 2).same
    run(tmp_path, 1, 1, **key_bias | {"0/b": np.full(3, 0.6)})
    assert (
        "step 0 with AdamW: loss and gradient norm agree, but b moves"
        in judge(tmp_path, SIDES, ["plain SGD", "AdamW"], 2).what
    )


def test_what_only_one_file_says_is_given_to_the_other_or_left_out() -> None:
    scheduled = Configuration(
        "ds", "ds_config", "fp32", ds_config={"scheduler": {}, "optimizer": {}}, own_schedule=True, own_optimizer=True
    )
    plain, _ = _comparable(scheduled, SIDES[0])
    assert plain.ds_config == {}
    assert not plain.own_schedule
    assert not plain.own_optimizer
    assert len(plain.notes) == 2
    adamw = replace(scheduled, optimizer={"name": "adamw"})  # which the other can be given
    kept, _ = _comparable(adamw, SIDES[0])
    assert kept.ds_config == {"optimizer": {}}
    both, _ = _comparable(scheduled, scheduled)
    assert both.ds_config == scheduled.ds_config


def test_clipping_that_never_came_into_play_is_said(tmp_path: Path) -> None:
    for side in (0, 1):
        run(tmp_path, 0, side, norms=np.array([0.5, 0.4]))
    off = Configuration("y", "plan", "fp32", clip_grad_norm=None)
    verdict = judge(tmp_path, (SIDES[0], off), ["plain SGD"], 2)
    assert verdict.same
    assert "norms stayed below 0.5" in verdict.what
