"""ddp on one rank is what every backend is held against; here it is held against a plain loop with torch's own loss."""

from typing import Any

import pytest
import torch
from torch import nn

from shardlab.backends.base import Job
from shardlab.backends.ddp import DDPBackend
from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.model.deferred import ModuleWeights
from shardlab.model.trainable import make_trainable
from shardlab.plan import Plan
from shardlab.recipe import SGD, AdamW
from shardlab.topology import Topology
from tests.model.families import CONFIGS, batch, build, inputs

ALONE = Topology(0, 1, 0, 1, 0, 1, "cpu", host_memory_bytes=1 << 30, device_memory_bytes=None, launcher="none")


def plan(accumulation: int, clip: float | None, precision: str = "fp32") -> Plan:
    return Plan("ddp", 1, 2, accumulation, 2 * accumulation, precision, clip_grad_norm=clip)


def backend(model: nn.Module, optimizer: AdamW | SGD, clip: float | None, precision: str = "fp32") -> DDPBackend:
    engine = DDPBackend()
    engine.prepare(Job(make_trainable(model).train(), plan(3, clip, precision), optimizer, ALONE), ModuleWeights(model))
    return engine


def micro_batches(step: int) -> list[dict[str, Any]]:
    """Three of unlike numbers of targets."""
    made = [batch(seed=10 * step + i) for i in range(3)]
    for i, one in enumerate(made):
        one["targets"][:, : 4 * i] = IGNORED
    return made


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("family", ["llama", "tied llama", "gemma2", "gpt2"])
def test_steps_are_those_of_a_plain_loop(family: str, clip: float | None) -> None:
    plain = build(CONFIGS[family]())
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if family == "gpt2":
        for block in plain.transformer.h:
            block.attn.attn_dropout.p = 0.0
    ours = build(CONFIGS[family]())
    engine = backend(ours, AdamW(lr=1e-2, weight_decay=0.1), clip)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(4):
        parts = micro_batches(step)
        tokens = sum(int((one["targets"] != IGNORED).sum()) for one in parts)
        total = 0.0
        optimizer.zero_grad()
        for one in parts:
            logits = plain(**inputs(one), use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), one["targets"].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf")).item()
        optimizer.step()
        applied = engine.run_window(
            Window(step, tuple(MicroBatch(one, i) for i, one in enumerate(parts)), tokens), 1e-2
        )
        assert applied.tokens == tokens
        assert not applied.skipped
        assert applied.loss_sum == pytest.approx(total, rel=1e-6)
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4)
    expected = dict(plain.named_parameters())
    for name, value in engine.tensors():
        difference = (value - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
        assert difference < 1e-3 or (value - expected[name]).abs().max() < 1e-4, name


def test_evaluation_is_the_sum_over_the_valid_targets_without_dropout() -> None:
    plain = build(CONFIGS["gpt2"]()).eval()
    engine = backend(build(CONFIGS["gpt2"]()), AdamW(), None)
    parts = micro_batches(0)
    expected = sum(
        nn.functional.cross_entropy(
            plain(**inputs(one), use_cache=False).logits.flatten(0, 1), one["targets"].flatten(), reduction="sum"
        ).item()
        for one in parts
    )
    loss_sum, tokens = engine.evaluate(MicroBatch(one, i) for i, one in enumerate(parts))
    assert loss_sum == pytest.approx(expected, rel=1e-6)
    assert tokens == sum(int((one["targets"] != IGNORED).sum()) for one in parts)


def test_a_rate_of_a_group_follows_the_schedule() -> None:
    """A group's rate is a share of the step's, so that a schedule scales both."""
    from shardlab.recipe import ParameterGroup

    settings = SGD(name="sgd", lr=1.0, groups=(ParameterGroup(pattern="*norm*", lr=0.25),))
    engine = backend(build(CONFIGS["llama"]()), settings, None)
    parts = micro_batches(0)
    engine.run_window(Window(0, tuple(MicroBatch(one, i) for i, one in enumerate(parts)), 40), 0.5)
    rates = {name: group["lr"] for group in engine.optimizer.param_groups for name in group["names"]}
    assert rates["model.norm.weight"] == 0.125
    assert rates["model.layers.0.mlp.up_proj.weight"] == 0.5
