"""What the pool's workers run: one small training job on a given backend."""

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlab.backends import make_backend
from shardlab.backends.base import Job
from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.model.deferred import build_deferred
from shardlab.model.trainable import make_trainable
from shardlab.plan import Offload, Plan
from shardlab.recipe import SGD, AdamW
from shardlab.topology import Topology

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 65


def tiny_llama(tied: bool = False, dropout: float = 0.0) -> torch.nn.Module:
    """5 rows of MLP weights and 65 of vocabulary: neither divides by 2 or 4 ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def global_batch(step: int, sequences: int = SEQUENCES) -> dict[str, Tensor]:
    """Sequences with unlike numbers of targets; the second row has none at all, the third two documents."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(sequences):
        targets[row, LENGTH - (3 * row % LENGTH) :] = IGNORED
    targets[1] = IGNORED
    positions = torch.arange(LENGTH).repeat(sequences, 1)
    positions[2, 6:] -= 6
    targets[2, 5] = IGNORED
    return {"input_ids": tokens[:, :-1], "targets": targets, "position_ids": positions}


def window(step: int, micro: int, rank: int, world: int, batch: dict[str, Tensor]) -> Window:
    """This rank's part of the global batch, in micro-batches of `micro` sequences."""
    count = batch["targets"].shape[0] // micro // world
    indices = range(rank * count, (rank + 1) * count)
    parts = tuple(MicroBatch({k: v[i * micro : (i + 1) * micro] for k, v in batch.items()}, i) for i in indices)
    return Window(step, parts, int((batch["targets"] != IGNORED).sum()))


def train(
    backend: str,
    *,
    micro: int = 1,
    steps: int = 3,
    optimizer: str = "sgd",
    lr: float = 0.1,
    clip: float | None = 1.0,
    tied: bool = False,
    dropout: float = 0.0,
    recompute: str = "none",
    precision: str = "fp32",
    freeze: tuple[str, ...] = (),
    offload: str = "none",
    incomplete: bool = False,
    poison_step: int | None = None,
) -> dict[str, Any]:
    """Train the tiny model; losses, norms and (on rank 0) all tensors before and after."""
    topology = Topology.detect()
    rank, world = topology.rank, topology.world_size
    plan = Plan(
        backend=backend,
        world_size=world,
        micro_batch=micro,
        accumulation=SEQUENCES // micro // world,
        global_batch_size=SEQUENCES,
        precision=precision,
        recompute=recompute,
        clip_grad_norm=clip,
        offload=Offload(offload, offload) if backend != "zero2" and backend != "zero1" else Offload("none", offload),
    )
    module, weights = build_deferred(lambda: tiny_llama(tied, dropout), seed=0)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in freeze)
    trainable = make_trainable(module, seed=7, recompute=recompute)
    trainable.train()
    settings = SGD(name="sgd", lr=lr) if optimizer == "sgd" else AdamW(lr=lr, weight_decay=0.1)
    engine = make_backend(plan)
    engine.prepare(Job(trainable, plan, settings, topology), weights)
    before = {name: value.clone() for name, value in engine.tensors()}
    applied = []
    for step in range(steps):
        batch = global_batch(step)
        if incomplete and step == steps - 1:
            batch["targets"][5:] = IGNORED
        mine = window(step, micro, rank, world, batch)
        if step == poison_step and rank == world - 1:
            trainable.random = replace(trainable.random)
            with poisoned(trainable):
                applied.append(engine.run_window(mine, lr))
        else:
            applied.append(engine.run_window(mine, lr))
        if step == 0:
            unchanged = engine.unchanged_parameters()
    evaluation = engine.evaluate(window(0, micro, rank, world, global_batch(99)).micro_batches)
    after = {name: value.clone() for name, value in engine.tensors()}
    engine.close()
    del engine, trainable, module
    gc.collect()
    result = {
        "loss": [a.loss_sum / a.tokens for a in applied],
        "norm": [a.grad_norm for a in applied],
        "skipped": [a.skipped for a in applied],
        "evaluation": evaluation,
        "unchanged": unchanged,
    }
    return result | ({"before": before, "after": after} if rank == 0 else {})


class poisoned:
    """The model's last block gives an infinite activation inside."""

    def __init__(self, trainable: Any):
        self._block = trainable.blocks[-1]

    def __enter__(self) -> None:
        def spoil(_module: Any, _arguments: Any, output: Tensor) -> Tensor:
            return output * torch.tensor(float("inf"))

        self._hook = self._block.register_forward_hook(spoil)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
