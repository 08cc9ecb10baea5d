"""What the pool's ranks run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab import Callback, Engine
from shardlab.backends import zero_config
from shardlab.checkpoint import CheckpointReader
from shardlab.data import MicroBatch, WindowLoader, evaluation_batches, prepare_data
from shardlab.errors import UserError
from shardlab.model import qat
from shardlab.recipe import load_recipe
from shardlab.train.artifact import save_artifact
from shardlab.train.callbacks import Evaluation, StepResult
from shardlab.train.checkpointing import find_resumption
from shardlab.train.run import setup_from_recipe, train
from tests.distributed.jobs import state_elements
from tests.train.loop import Outcome, through_engine
from tests.train.support import TINY

Array = NDArray[np.float32]
PROBE = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]


@dataclass
class Live:
    """The sharded model when it was written: logits of PROBE, (batch, sequence, vocabulary), and its buffers."""

    logits: Array
    buffers: dict[str, Array]


def engine_of(recipe: Path, *overrides: str) -> tuple[Engine, WindowLoader]:
    """An engine that holds the recipe's model, and its windows; ZeRO-3 shards the smallest tensor too."""
    engine = Engine.from_recipe(recipe, overrides=overrides)
    data = prepare_data(engine.recipe.data)
    with mock.patch.object(zero_config, "PERSISTENCE_THRESHOLD", 0):
        taught = setup_from_recipe(engine, data)
    plan, topology = engine.plan, engine.topology
    loader = taught.windows(
        global_batch_size=plan.global_batch_size,
        micro_batch=plan.micro_batch,
        rank=topology.rank,
        world_size=topology.world_size,
        seed=plan.seed,
        steps=engine.recipe.train.steps,
    )
    return engine, loader


def train_and_save(recipe: Path, overrides: Sequence[str], directory: Path) -> Live:
    """All steps, then the model's directory."""
    engine, loader = engine_of(recipe, *overrides)
    for window in loader:
        engine.step(window)
    engine.save(directory)
    buffers = {name: to_array(buffer) for name, buffer in engine.module.body.named_buffers()}
    live = Live(live_logits(engine), buffers)
    engine.close()
    return live


def live_logits(engine: Engine) -> Array:
    """Taken inside a forward pass, where the backend has gathered what the model needs."""
    tail = engine.module.tail
    assert tail is not None
    found: list[Tensor] = []

    def look(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(module.logits(arguments[0]))  # type: ignore[operator]

    hook = tail.register_forward_pre_hook(look)
    inputs = torch.tensor(PROBE)
    positions = torch.arange(inputs.shape[1]).expand(inputs.shape)
    engine.evaluate([MicroBatch({"input_ids": inputs, "targets": inputs, "position_ids": positions}, 0)])
    hook.remove()
    return to_array(found[0])


def to_array(tensor: Tensor) -> Array:
    """A tensor travels between processes by a file descriptor, an array by value."""
    return tensor.detach().float().cpu().numpy().copy()


def save_late(recipe: Path, directory: Path) -> None:
    """The second rank comes to the save when the first has long written all that is its own to write."""
    engine, _ = engine_of(recipe, "shard.backend=ddp")
    if not engine.topology.is_main:
        time.sleep(1.0)
    engine.save(directory)
    engine.close()


def train_run(
    recipe: Path, output: Path, overrides: Sequence[str] = (), world_size: int = 2, resume: str | None = None
) -> dict[str, Any] | str | None:
    """`shardlab train` on this rank: the summary where it is told, or what the user is told."""
    loaded = load_recipe(recipe, overrides)
    try:
        return train(loaded, output, world_size=world_size, resume=resume, say=lambda _: None)
    except UserError as error:
        return str(error)


def user_loop(recipe: Path, backend: str, shares: Sequence[Sequence[int]], directory: Path) -> Outcome:
    """A user's own loop over the batches that are this rank's share."""
    engine = Engine.from_recipe(recipe, overrides=[f"shard.backend={backend}"])
    return through_engine(engine, shares[engine.topology.rank], directory)


def own_loop_that_resumes(recipe: Path, output: Path, backend: str, stop: int) -> list[float | None]:
    """A user's own loop up to step `stop`, over a loader that starts anew in each life; the losses of this life."""
    with Engine.from_recipe(recipe, overrides=[f"shard.backend={backend}"], output=output) as engine:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**TINY))
        rank, world = engine.topology.rank, engine.topology.world_size
        ids = torch.randint(64, (8, world, 2, 16), generator=torch.Generator().manual_seed(0))
        batches = ({"input_ids": batch[rank], "labels": batch[rank]} for batch in ids)
        _, _, windows = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches)
        engine.load_state()
        losses: list[float | None] = []
        for window in windows:
            losses.append(engine.step(window))
            if engine.steps_done == stop:
                break
        engine.save_state()
    return losses


@dataclass
class Restored:
    """What a rank's memory did while a checkpoint was verified and loaded, in bytes."""

    grown: int  # the peak, above what was in use before
    moments: int  # of that what stays: this rank's part of them
    read: int


def restored(recipe: Path, backend: str, run: Path) -> Restored:
    """The recipe's model takes the state of the run's newest checkpoint."""
    engine, _ = engine_of(recipe, f"shard.backend={backend}")
    engine.meter.reset()
    before = engine.meter.current_bytes()
    found = find_resumption(str(run), run, engine.ranks, print)
    assert found is not None
    with CheckpointReader(found.path) as reader:
        engine.backend.load(reader)
        grown, moments = engine.meter.peak_bytes() - before, 2 * 4 * state_elements(engine.backend.optimizer)
        outcome = Restored(grown, moments, reader.bytes_read)
    engine.close()
    return outcome


def save_alone(recipe: Path, backend: str, rank: int, directory: Path) -> list[str]:
    """One rank saves the state and the model, the other does neither; what it is told."""
    engine, _ = engine_of(recipe, f"shard.backend={backend}", "shard.timeout_seconds=2")
    told = []
    if engine.topology.rank == rank:
        for save in (engine.save_state, engine.save):
            try:
                save(directory)
            except RuntimeError as error:
                told.append(str(error))
    engine.close()
    return told


def rates(recipe: Path, accumulation: int) -> list[float]:
    """The learning rate of each update, with one sequence in a micro-batch."""
    world = Engine.from_recipe(recipe).topology.world_size
    engine, loader = engine_of(recipe, "shard.micro_batch=1", f"train.global_batch_size={world * accumulation}")
    found = []
    for window in loader:
        found.append(engine.learning_rate())
        engine.step(window)
    engine.close()
    return found


@dataclass
class Adapted:
    """A run with adapters on one rank. Whole tensors are kept on the first rank only, for they are the same on all."""

    losses: list[float | None]
    before: dict[str, Array]
    after: dict[str, Array]
    trainable: set[str]
    state_elements: int  # of first moments on this rank


def adapt(recipe: Path, overrides: Sequence[str], directory: Path) -> Adapted:
    """All steps; then `directory`/adapters and, by the same weights, `directory`/merged."""
    engine, loader = engine_of(recipe, *overrides)
    before = {name: to_array(tensor) for name, tensor in engine.backend.tensors()}
    losses = [engine.step(window) for window in loader]
    after = {name: to_array(tensor) for name, tensor in engine.backend.tensors()}
    engine.save(directory / "adapters")
    section = engine.recipe.model
    assert section.lora is not None
    merging = section.model_copy(update={"lora": section.lora.model_copy(update={"merge": True})})
    merged = directory / "merged"
    save_artifact(merged, engine.module, engine.backend.tensors(), None, engine.topology, merging, engine.masks)
    outcome = Adapted(
        losses,
        before if engine.topology.is_main else {},
        after if engine.topology.is_main else {},
        {name for name, _ in engine.module.named_trainables()},
        state_elements(engine.backend.optimizer),
    )
    engine.close()
    return outcome


def perplexities(recipe: Path, backend: str, batches: Sequence[dict[str, Array]]) -> list[tuple[float, int]]:
    """(loss, tokens) of the recipe's held-out rows in micro-batches of 1 and 3, packed and not; then of own batches.

    Every rank is given all of the latter, and takes its turn.
    """
    found = []
    for packing in ("true", "false"):
        engine, _ = engine_of(recipe, f"shard.backend={backend}", f"data.packing={packing}")
        topology = engine.topology
        rows = prepare_data(engine.recipe.data).evaluation
        assert rows is not None
        ranks = {"rank": topology.rank, "world_size": topology.world_size}
        found += [engine.evaluate(evaluation_batches(rows, micro_batch=size, **ranks)) for size in (1, 3)]
        mine = batches[topology.rank :: topology.world_size]
        found.append(engine.evaluate({key: torch.tensor(value) for key, value in one.items()} for one in mine))
        engine.close()
    return found


def diary(recipe: Path, output: Path) -> list[tuple[Any, ...]]:
    """What a callback on this rank is told: kind, step and loss."""
    told: list[tuple[Any, ...]] = []

    class Diary(Callback):
        def on_start(self, engine: Engine) -> None:
            told.append(("start",))

        def on_step(self, engine: Engine, result: StepResult) -> None:
            told.append(("step", result.step, result.loss, result.grad_norm))

        def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
            told.append(("evaluate", evaluation.step, evaluation.loss, evaluation.tokens))

        def on_end(self, engine: Engine, error: BaseException | None) -> None:
            told.append(("end", error))

    train(load_recipe(recipe), output, world_size=2, callbacks=[Diary()], say=lambda _: None)
    return told


def masked_steps(recipe: Path, overrides: Sequence[str], directory: Path) -> tuple[list[int], list[float | None]]:
    """After each step, how many pruned weights are not zero, in the masters here and in what computes; the losses."""
    engine, loader = engine_of(recipe, *overrides)
    came_back, losses = [], []
    for window in loader:
        losses.append(engine.step(window))
        wrong = 0
        for name, tensor in engine.backend.tensors():
            if name in engine.masks:
                wrong += int(tensor[~engine.masks.stays(name, tuple(tensor.shape))].count_nonzero())
        for fragment in engine.backend.fragments():
            if fragment.kind == "master" and fragment.name in engine.masks:
                gone = ~engine.masks.stays(fragment.name, fragment.shape)[fragment.box.slices]
                wrong += int(fragment.data[gone].count_nonzero())
        came_back.append(wrong)
    engine.save(directory)
    engine.close()
    return came_back, losses


def rounded_steps(
    recipe: Path, overrides: Sequence[str], directory: Path
) -> tuple[list[float | None], dict[str, Array]]:
    """The losses; and, after the last step, the weight that each rounded layer computes with."""
    engine, loader = engine_of(recipe, *overrides)
    losses = [engine.step(window) for window in loader]
    engine.save(directory)
    seen: list[Array] = []
    read = qat._read

    def note(*given: Any) -> Tensor:
        result = read(*given)
        seen.append(to_array(result))
        return result

    inputs = torch.tensor(PROBE)
    positions = torch.arange(inputs.shape[1]).expand(inputs.shape)
    with mock.patch.object(qat, "_read", note):
        engine.evaluate([MicroBatch({"input_ids": inputs, "targets": inputs, "position_ids": positions}, 0)])
    engine.close()
    order = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    order += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(TINY["num_hidden_layers"]) for name in order]
    return losses, dict(zip(names, seen, strict=True))
