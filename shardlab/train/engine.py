"""The engine: one optimizer step after another, the same for our command and for a user's own loop.

It knows windows, schedules and policies, and nothing of DeepSpeed or FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.backends import Job, make_backend
from shardlab.backends.base import OptimizerSettings, all_reduce_sum, fingerprint
from shardlab.backends.optimizer import like
from shardlab.data import MicroBatch, Window, windows_from_batches
from shardlab.errors import UserError
from shardlab.model.deferred import ModuleWeights, Weights
from shardlab.model.trainable import Trainable, make_trainable
from shardlab.plan import Plan
from shardlab.recipe import ModelSection, Recipe, load_recipe
from shardlab.runtime.environment import apply_in_process
from shardlab.topology import Topology, check_collectives
from shardlab.train.artifact import save_artifact
from shardlab.train.meter import MemoryMeter
from shardlab.train.schedules import learning_rate
from shardlab.train.start import check

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class StepResult:
    """What one window did.

    `loss` is the mean over the global batch's valid tokens, before the update; None where there were none.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    skipped: bool

    @property
    def finite(self) -> bool:
        """Whether nothing in it was NaN or infinite."""
        return all(math.isfinite(value) for value in (self.loss, self.grad_norm) if value is not None)


class NonFiniteError(UserError):
    """A loss or gradient was NaN or infinite and the recipe says `on_nonfinite: stop`. No weight was touched."""

    def __init__(self, message: str, result: StepResult):
        super().__init__(message)
        self.result = result


class Engine:
    """Trains one model by one recipe on the ranks of this job.

    `applied` counts updates; `nonfinite_steps` the windows left out for a NaN or infinity. `meter` measures this
    rank's memory, of which `base_bytes` were in use before there was a model.
    """

    def __init__(self, recipe: Recipe, topology: Topology, plan: Plan):
        self.recipe = recipe
        self.topology = topology
        self.plan = plan
        self.applied = 0
        self.nonfinite_steps = 0
        self.meter = MemoryMeter(topology)
        self.base_bytes = 0
        self.module: Trainable
        self._tokenizer: Any = None
        self._peak = recipe.train.optimizer.lr
        self._source = recipe.model

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe | str | Path,
        *,
        overrides: Sequence[str] = (),
        accelerator: Accelerator | None = None,
        world_size: int | None = None,
    ) -> Engine:
        """Join the job and resolve the recipe for it.

        `world_size` is the number of ranks expected, if the recipe does not say. `accelerator`: the user's own, made
        before; its state is then what says rank, world size and device. Raises UserError for what the user can mend.
        """
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(recipe, overrides)
        apply_in_process()
        del accelerator  # Accelerate's state is shared by the process: that it exists is all that is needed of it
        expected = world_size if world_size is not None else recipe.shard.world_size
        topology = Topology.detect(expected, recipe.shard.timeout_seconds)
        plan = check(recipe, topology.world_size)
        check_collectives(topology)
        return cls(recipe, topology, plan)

    def setup(self, model: nn.Module, weights: Weights, optimizer: OptimizerSettings, tokenizer: Any = None) -> None:
        """Hand the model to the backend: from here on it is sharded."""
        self.module = make_trainable(model, seed=self.plan.seed, recompute=self.plan.recompute)
        self.module.train()
        self._tokenizer = tokenizer
        self._backend = make_backend(self.plan)
        self.base_bytes = self.meter.current_bytes()  # the libraries, before the model
        self._backend.prepare(Job(self.module, self.plan, optimizer, self.topology), weights)
        self.module.check_tie()
        self._check_buffers()

    def _check_buffers(self) -> None:
        """Rotary frequencies and the like are computed on every rank: one that differs would be wrong in silence."""
        names = [name for name, _ in self.module.named_buffers()]
        prints = torch.tensor([fingerprint(buffer) for _, buffer in self.module.named_buffers()], dtype=torch.float64)
        mine = prints.to(self.topology.device)
        first = all_reduce_sum(mine * self.topology.is_main, self.topology)
        unlike = (mine != first).to(torch.float64)
        for name, ranks in zip(names, all_reduce_sum(unlike, self.topology).tolist(), strict=True):
            if ranks:
                raise RuntimeError(f"the buffer {name} is not the same on all ranks")

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, loader: Iterable[Mapping[str, Tensor]]
    ) -> tuple[Trainable, Any, Iterator[Window]]:
        """For a user's own loop: (the sharded model, its optimizer, an iterator of windows).

        The optimizer that comes back is of the given one's kind, options and groups, over the sharded parameters; the
        given one is emptied, for it would hold tensors that are no longer trained. The rate follows the recipe's
        schedule, its peak being the given optimizer's. `loader` yields this rank's batches (`input_ids` and `labels`
        as for transformers).
        """
        settings = like(optimizer, model)
        self._peak = float(optimizer.defaults["lr"])
        self._source = ModelSection()  # not the recipe's model
        self.setup(model, ModuleWeights(model), settings)
        optimizer.state.clear()
        optimizer.param_groups.clear()
        return self.module, self._backend.optimizer, self._windows(loader)

    def _windows(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Window]:
        return windows_from_batches(
            loader,
            accumulation=self.plan.accumulation,
            rank=self.topology.rank,
            world_size=self.topology.world_size,
            all_reduce=self._sum_integers if self.topology.world_size > 1 else None,
        )

    def _sum_integers(self, values: Tensor) -> None:
        moved = values.to(self.topology.device)
        values.copy_(all_reduce_sum(moved, self.topology))

    def step(self, window: Window) -> float | None:
        """Forward, token-weighted loss, backward, clip, update. The loss; see `run` for the rest."""
        return self.run(window).loss

    def run(self, window: Window) -> StepResult:
        """One optimizer step. Raises NonFiniteError by policy, RuntimeError where the first step changes nothing."""
        lr = self.learning_rate()
        if window.tokens == 0:
            # Nothing to learn from: an update would still decay the weights. Every rank knows it without asking.
            return StepResult(None, None, lr, 0, skipped=True)
        try:
            applied = self._backend.run_window(window, lr)
        except RuntimeError as error:
            # torch's own messages of a failed collective say neither which step nor which rank.
            raise RuntimeError(f"step {window.step + 1}, rank {self.topology.rank}: {error}") from error
        result = StepResult(applied.loss_sum / applied.tokens, applied.grad_norm, lr, applied.tokens, applied.skipped)
        if not result.skipped:
            self.applied += 1
            if self.applied == 1:
                self._check_changed(lr)
        else:
            self.nonfinite_steps += 1
            if self.recipe.train.on_nonfinite == "stop":
                raise NonFiniteError(
                    f"step {window.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}; the weights are "
                    "those before this step. Lower train.optimizer.lr, or go on without it: train.on_nonfinite=skip",
                    result,
                )
        return result

    def learning_rate(self) -> float:
        """The rate of the next update."""
        train = self.recipe.train
        return learning_rate(train.schedule, peak=self._peak, applied=self.applied, steps=train.steps)

    def _check_changed(self, lr: float) -> None:
        unchanged = self._backend.unchanged_parameters()
        if unchanged:
            raise RuntimeError(
                f"the first step, at learning rate {lr:g}, did not change {len(unchanged)} of the trainable tensors "
                f"though they have a gradient, among them {unchanged[0]}: the optimizer does not hold them, or the "
                "rate is below what fp32 can add"
            )

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss per token, tokens) over all ranks' batches; every rank brings the same number of them."""
        loss_sum, tokens = self._backend.evaluate(batches)
        return (loss_sum / tokens if tokens else math.nan), tokens

    def save(self, directory: str | Path, tokenizer: Any = None) -> None:
        """Write a Hugging Face model directory (or an adapter directory), tensor by tensor. Every rank calls this."""
        save_artifact(
            Path(directory),
            self.module,
            self._backend.tensors(),
            tokenizer or self._tokenizer,
            self.topology,
            self._source,
        )

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()
