"""Plans of other people's loops: whole logits, torch's AdamW as it comes, and what a real one takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.errors import UserError
from shardlab.plan import ROOT, Footprint, Loop, Plan, Precision
from shardlab.planner.machine import GIB, Machine
from shardlab.planner.plain import PlainLoop, plain_batch
from shardlab.planner.predict import Predictor
from shardlab.planner.search import candidates, predictor
from shardlab.planner.survey import parse_loop
from shardlab.planner.trace import Gradients, Tracer
from shardlab.recipe import Recipe
from tests.planner.test_trace import GPT2, LLAMA, one_thread

__all__ = ["one_thread"]  # a fixture for every test here too

PROGRAM = Path(__file__).parents[2] / "bench" / "plain_loop.py"
TEN_MILLION = {**LLAMA, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 7}
LARGE_VOCABULARY = {**LLAMA, "vocab_size": 262144, "num_hidden_layers": 2, "tie_word_embeddings": True}


def predict(
    directory: Path, config: dict[str, Any], precision: Precision, loop: Loop, *, accelerator: bool = False
) -> Predictor:
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    asked = Recipe.from_dict(
        {
            "model": {"config": str(file)},
            "data": {"tokenizer": "bytes", "sequence_length": 256},
            "train": {"precision": precision},
            "checkpoint": {"every": None},  # these loops save nothing
        }
    )
    return predictor(asked, Machine("test", 2, accelerator, GIB, GIB), loop=loop)


def one_rank(precision: Precision, micro_batch: int = 2, recompute: Any = "none") -> Plan:
    return Plan("ddp", 1, micro_batch, 1, micro_batch, precision, recompute=recompute)


def test_whole_logits_are_a_row_of_their_own_and_the_largest_with_256k_entries(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5102: estimates that leave out what a step allocates."""
    plan = one_rank("fp32")
    found = predict(tmp_path, LARGE_VOCABULARY, "fp32", "hf").footprint(plan)
    logits = 2 * 256 * 262144 * 4
    # The output's, the loss's logarithms of them, and two gradients.
    assert 3 * logits < found.bytes["logits"] < 4.1 * logits
    assert found.bytes["logits"] > found.tensors / 2
    ours = predict(tmp_path, LARGE_VOCABULARY, "fp32", "shardlab").footprint(plan)
    assert "logits" not in ours.bytes
    assert ours.tensors < found.tensors - 2 * logits


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2-tied"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_the_trace_is_within_one_percent_of_the_allocators_own_events(config: dict[str, Any], autocast: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).train()
    batch = plain_batch(4, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(**batch)
        if autocast:
            output.logits = output.logits.float()
        output.loss.backward()
    events: Any = profiler.profiler
    total = measured = 0
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    for _, change in sorted(changes):
        total += change
        measured = max(measured, total)
    module = PlainLoop(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32))
    module.autocast = autocast
    block = sum(parameter.numel() for parameter in module.blocks[0].parameters()) * 4
    count, peaks = len(module.blocks), []
    for span in Tracer(module).timeline(batch, "fp32", "units", "none"):
        # The real gradients stay, and the trace's go with their unit.
        kept = (count - span.segment) * block if span.phase == "backward" and 0 < span.segment <= count else 0
        peaks.append(sum(span.peak.values()) + kept)
    assert max(peaks) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("gradients", ["units", "each"])
def test_three_blocks_stand_for_all(recompute: Any, gradients: Gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for keys and values, which the output of a plain loop keeps through the backward pass."""
    batch, config = plain_batch(2, 64), {**LLAMA, "num_hidden_layers": 7}

    def traced() -> Any:
        module = PlainLoop(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
        return Tracer(module).timeline(batch, "fp32", gradients, recompute)

    short = traced()
    monkeypatch.setattr("shardlab.planner.trace._repeats", lambda module: False)
    whole = traced()
    assert [(s.phase, s.segment) for s in short] == [(s.phase, s.segment) for s in whole]
    for one, other in zip(short, whole, strict=True):
        assert sum(one.peak.values()) == pytest.approx(sum(other.peak.values()), rel=0.005, abs=2048), one.segment
        assert sum(one.exit.values()) == pytest.approx(sum(other.exit.values()), rel=0.005, abs=2048), one.segment


def test_an_accelerator_takes_the_roots_of_all_moments_at_once(tmp_path: Path) -> None:
    on_cpu, on_device = (
        next(m for m in predict(tmp_path, TEN_MILLION, "fp32", "hf", accelerator=a).moments(one_rank("fp32"))
             if m.name == "update")
        for a in (False, True)
    )  # fmt: skip
    assert on_device.bytes["temporaries"] == on_device.bytes["parameters"]
    assert on_cpu.bytes["temporaries"] == 2 * 8192 * 256 * 4


def test_sharding_is_by_blocks_and_only_where_accelerate_shards(tmp_path: Path) -> None:
    base = one_rank("bf16")
    machine = Machine("test", 2, False, GIB, GIB)
    on_cpu = {plan.backend for plan in candidates(Plan("ddp", 2, 1, 1, 2, "bf16"), machine, "hf")}
    assert "fsdp" not in on_cpu
    found = predict(tmp_path, TEN_MILLION, "bf16", "hf", accelerator=True)
    sharded = Plan("fsdp", 2, 2, 1, 4, "bf16")
    assert {p.unit for p in found._shape(sharded).parameters} == {ROOT, *range(1, 8)}
    assert {p.unit for p in found._shape(base).parameters} == {ROOT, *range(1, 10)}
    forward = next(m for m in found.moments(sharded) if m.name == "forward pass of block 7 of 7")
    assert forward.bytes["communication"] >= 2 * 8192 * 256 * 2, "embedding and head stay gathered"


def test_weights_in_bf16_halve_the_state(tmp_path: Path) -> None:
    mixed = predict(tmp_path, TEN_MILLION, "bf16", "hf").footprint(one_rank("bf16"))
    pure = predict(tmp_path, TEN_MILLION, "bf16", "hf-bf16").footprint(one_rank("bf16"))
    for kind in ("parameters", "moments"):
        assert pure.bytes[kind] * 2 == mixed.bytes[kind]


def test_a_loop_that_is_not_known_is_an_error() -> None:
    assert parse_loop("hf") == "hf"
    with pytest.raises(UserError, match="--loop ours: expected shardlab, hf, hf-bf16"):
        parse_loop("ours")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision", "loop", "recompute", "micro_batch"),
    [
        pytest.param(TEN_MILLION, "fp32", "hf", "none", 2, id="fp32"),
        pytest.param(TEN_MILLION, "bf16", "hf", "full", 8, id="autocast-recompute"),
        pytest.param(TEN_MILLION, "bf16", "hf-bf16", "none", 4, id="bf16-weights"),
        pytest.param({**LARGE_VOCABULARY, "vocab_size": 65536}, "fp32", "hf", "none", 2, id="64k-vocabulary"),
    ],
)
def test_a_real_loops_peak_is_inside_the_interval(
    config: dict[str, Any], precision: Precision, loop: Loop, recompute: Any, micro_batch: int, tmp_path: Path
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4527: 0.49 GiB promised, 20.8 used."""
    plan = one_rank(precision, micro_batch, recompute)
    found = predict(tmp_path, config, precision, loop).footprint(plan)
    peak = measured_peak(tmp_path, plan, config, loop)
    assert found.low <= peak <= found.high, (found, peak)


def measured_peak(directory: Path, plan: Plan, config: dict[str, Any], loop: Loop) -> int:
    """Anonymous and shared memory of a plain loop in a process of its own, above its libraries'."""
    settings = {
        "model": config, "precision": plan.precision, "recompute": plan.recompute, "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation, "loop": loop, "sequence_length": 256,
    }  # fmt: skip
    (directory / "settings.json").write_text(json.dumps(settings))
    # As the launch line of `--emit` sets it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, str(PROGRAM), str(directory / "settings.json"), str(directory / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((directory / "result.json").read_text())
    return int(result["peaks"][0])


def test_the_interval_holds_loops_that_drop_the_output(tmp_path: Path) -> None:
    """The HF Trainer keeps the loss alone: one copy of the logits less."""
    found: Footprint = predict(tmp_path, LARGE_VOCABULARY, "fp32", "hf").footprint(one_rank("fp32"))
    assert found.low <= found.tensors - 2 * 256 * 262144 * 4
