"""A user's own model, optimizer, batches and loop; and the same loop by hand, in plain torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab import Engine
from tests.train.support import TINY

Weights = dict[str, NDArray[np.float32]]
CLIP = 1.0


@dataclass
class Outcome:
    """The loss of each window, and the weights at the end."""

    losses: list[float | None]
    weights: Weights


def tiny_llama() -> nn.Module:
    """The same values at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    return model


def two_groups(model: nn.Module) -> AdamW:
    """No decay for what has one dimension, and a rate of its own."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    rest = [parameter for parameter in parameters if parameter.dim() == 1]
    return AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 3e-4}], lr=1e-3, weight_decay=0.1)


def batch(index: int) -> dict[str, Tensor]:
    """Two sequences with labels as for transformers; more of them count in a later batch."""
    draw = torch.Generator().manual_seed(100 + index)
    inputs = torch.randint(0, TINY["vocab_size"], (2, 12), generator=draw)
    labels = inputs.clone()
    labels[0, : 9 - index] = -100
    return {"input_ids": inputs, "labels": labels}


def through_engine(engine: Engine, indices: Sequence[int], directory: Path) -> Outcome:
    """The five lines."""
    model = tiny_llama()
    _, _, loader = engine.prepare(model, two_groups(model), [batch(index) for index in indices])
    losses = [engine.step(window) for window in loader]
    engine.save(directory)
    engine.close()
    weights = load_file(directory / "model.safetensors")
    return Outcome(losses, {name: value.numpy() for name, value in weights.items()})


def by_hand(windows: Sequence[Sequence[int]], stays: Mapping[str, Tensor] | None = None) -> Outcome:
    """Each window's batches make one step, whose loss is the mean over all the tokens that count in it.

    What does not stay is zero at the start and after each step.
    """
    model = tiny_llama()
    optimizer = two_groups(model)
    _mask(model, stays or {})
    losses: list[float | None] = []
    for window in windows:
        total = sum(int((batch(index)["labels"][:, 1:] >= 0).sum()) for index in window)
        mean = torch.zeros(())
        for index in window:
            inputs, labels = batch(index).values()
            logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
            summed = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            mean = mean + summed / total
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        _mask(model, stays or {})
        optimizer.zero_grad()
        losses.append(mean.item())
    return Outcome(losses, {name: value.detach().numpy() for name, value in model.named_parameters()})


@torch.no_grad()
def _mask(model: nn.Module, stays: Mapping[str, Tensor]) -> None:
    for name, mask in stays.items():
        model.get_parameter(name).mul_(mask)


def assert_agree(result: Outcome, expected: Outcome) -> None:
    """Losses, and each tensor by its L2 norm, to 1e-5."""
    np.testing.assert_allclose(np.array(result.losses, float), np.array(expected.losses, float), rtol=1e-5)
    assert result.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert np.linalg.norm(result.weights[name] - value) <= 1e-5 * np.linalg.norm(value), name
