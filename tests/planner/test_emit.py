"""ds_configs/: what the emitter writes, what DeepSpeed takes, what the HF Trainer runs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from shardlab.plan import Plan
from shardlab.planner.emit import GENERAL, as_text, general_config, plan_config
from shardlab.planner.lint import autos, lint_ds_config

DIRECTORY = Path(__file__).parents[2] / "ds_configs"
TRAINER = Path(__file__).with_name("programs") / "hf_trainer.py"


def read(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def test_the_directory_holds_what_the_emitter_writes() -> None:
    """After a change: `python -m shardlab.planner.emit ds_configs`."""
    assert {file.stem for file in DIRECTORY.glob("*.json")} == set(GENERAL)
    for name in GENERAL:
        assert (DIRECTORY / f"{name}.json").read_text() == as_text(general_config(name))


@pytest.mark.parametrize("name", GENERAL)
def test_deepspeed_takes_it_at_any_number_of_ranks(name: str) -> None:
    config = DeepSpeedConfig(str(DIRECTORY / f"{name}.json"))
    assert config.train_micro_batch_size_per_gpu == config.gradient_accumulation_steps == 1
    assert config.gradient_clipping == 1.0
    assert config.zero_config.stage == int(name[4])
    assert "train_batch_size" not in read(name)


@pytest.mark.parametrize("name", GENERAL)
def test_nothing_is_to_be_said_against_it(name: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/21342: no "auto" in anything that we write."""
    (tmp_path / "nvme_offload").mkdir()
    findings = lint_ds_config(read(name), root=tmp_path)
    assert [str(one) for one in findings if "a step is micro-batch" not in one.message] == []
    assert list(autos(read(name))) == []


def test_a_plan_is_written_as_it_is_run() -> None:
    plan = Plan("zero2", 2, 3, 4, 24, "bf16", clip_grad_norm=None)
    written = json.loads(plan_config(plan, [1000, 64]))
    assert written["train_batch_size"] == 24
    assert written["gradient_clipping"] == 0.0
    assert written["bf16"]["enabled"] is True


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_hf_trainer_runs_zero2_as_it_is(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(DIRECTORY.parent)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(TRAINER), str(DIRECTORY / "zero2.json"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "done.json").read_text())
    assert result["world_size"] == 2
    assert result["stage"] == 2
    assert [math.isclose(float(loss), math.log(64), rel_tol=0.1) for loss in result["losses"]] == [True, True]


@pytest.mark.slow
def test_zero3_nvme_runs(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed can't build async_io here: libaio's headers are missing (libaio-dev)")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    code = (
        "import json, sys, torch, deepspeed\n"
        "from shardlab.doctor.tiny import batch, tiny_model\n"
        "config = json.load(open(sys.argv[1]))\n"
        "config['zero_optimization']['offload_param']['buffer_size'] = 100_000\n"
        "model = tiny_model(None)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)\n"
        "for step in range(2):\n"
        "    engine.backward(engine(**batch(step, 0, 1)).loss)\n"
        "    engine.step()\n"
        "open('done', 'w').close()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [*launcher, str(tmp_path / "program.py"), str(DIRECTORY / "zero3_nvme.json")],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(DIRECTORY.parent)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    # Not its exit code: DeepSpeed's asynchronous I/O sometimes aborts when the interpreter ends, after all is done.
    assert (tmp_path / "done").exists(), done.stderr[-3000:]
