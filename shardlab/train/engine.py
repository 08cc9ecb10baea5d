"""The engine: one optimizer step after another, the same for our command and for a user's own loop.

It knows windows, schedules and policies, and nothing of DeepSpeed or FSDP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.backends import Job, make_backend
from shardlab.backends.base import Backend, OptimizerSettings, all_reduce_sum
from shardlab.backends.masked import MaskedWeights, zero_pruned
from shardlab.backends.optimizer import like
from shardlab.checkpoint import join
from shardlab.data import MicroBatch, Window
from shardlab.errors import UserError
from shardlab.model.cached_teacher import CachedTeacher
from shardlab.model.deferred import ModuleWeights, Weights
from shardlab.model.matching import WithProjections
from shardlab.model.qat import round_layers
from shardlab.model.teacher import Distillation
from shardlab.model.trainable import Trainable, make_trainable, refuse_packing
from shardlab.plan import Plan
from shardlab.recipe import ModelSection, Recipe, load_recipe
from shardlab.runtime.environment import apply_in_process, keep_freed
from shardlab.state.masks import Masks
from shardlab.topology import Topology, check_collectives
from shardlab.train.artifact import model_files, save_artifact
from shardlab.train.callbacks import Callback, Evaluation, StepResult
from shardlab.train.checkpointing import (
    DIRECTORY,
    Checkpoints,
    check_resumption,
    find_resumption,
    own_loop_identity,
    restore,
)
from shardlab.train.checks import check_buffers, check_changed, check_documents
from shardlab.train.meter import MemoryMeter
from shardlab.train.own_batches import batches_of, windows_of
from shardlab.train.schedules import learning_rate
from shardlab.train.start import RUNS, check, free_name
from shardlab.train.stream_files import stream_directory
from shardlab.train.tracking import Trackers

if TYPE_CHECKING:
    from accelerate import Accelerator


class NonFiniteError(UserError):
    """A loss or gradient was NaN or infinite and the recipe says `on_nonfinite: stop`. No weight was touched."""

    def __init__(self, message: str, result: StepResult):
        super().__init__(message)
        self.result = result


class Engine:
    """Trains one model by one recipe on the ranks of this job.

    `steps_done` counts windows, `applied` updates; `nonfinite_steps` the windows left out for a NaN or infinity.
    `meter` measures this rank's memory, of which `base_bytes` were in use before there was a model. `ranks` is how the
    job agrees on what is saved. As a context manager it closes itself, and tells its callbacks of an exception.
    """

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        plan: Plan,
        *,
        name: str = "recipe",
        output: Path | None = None,
        callbacks: Iterable[Callback] = (),
    ):
        self.recipe = recipe
        self.topology = topology
        self.plan = plan
        # Made here, where every rank comes by: a save that one rank calls alone has to find it.
        self.ranks = join(topology, plan.timeout_seconds)
        self.applied = 0
        self.nonfinite_steps = 0
        self.meter = MemoryMeter(topology)
        self.base_bytes = 0
        self.module: Trainable
        self.masks = Masks()
        self.callbacks = list(callbacks)
        self._name = name
        self._output = output
        self._backend: Backend | None = None
        self._checkpoints: Checkpoints | None = None
        self.steps_done = 0  # windows, applied or not
        self._tokenizer: Any = None
        self.peak_learning_rate = recipe.train.optimizer.lr
        self._source = recipe.model

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe | str | Path,
        *,
        overrides: Sequence[str] = (),
        accelerator: Accelerator | None = None,
        world_size: int | None = None,
        output: str | Path | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> Engine:
        """Join the job and resolve the recipe for it.

        `world_size` is the number of ranks expected, if the recipe does not say. `accelerator`: the user's own, made
        before; its state is then what says rank, world size and device. `output` is the run's directory, see
        `output`. Raises UserError for what the user can mend.
        """
        name = "recipe"
        if not isinstance(recipe, Recipe):
            name = Path(recipe).stem
            recipe = load_recipe(recipe, overrides)
        apply_in_process()
        del accelerator  # Accelerate's state is shared by the process: that it exists is all that is needed of it
        expected = world_size if world_size is not None else recipe.shard.world_size
        topology = Topology.detect(expected, recipe.shard.timeout_seconds)
        plan = check(recipe, topology.world_size)
        check_collectives(topology)
        directory = Path(output) if output is not None else None
        return cls(recipe, topology, plan, name=name, output=directory, callbacks=callbacks)

    @property
    def output(self) -> Path:
        """The run's directory, of `save` and the trackers: where none was given, the first free runs/NAME, NAME-2, ...

        The first rank looks for it, so where none was given every rank has to ask.
        """
        if self._output is None:
            number = torch.tensor(float(free_name(self._name) if self.topology.is_main else 0))
            chosen = int(all_reduce_sum(number.to(self.topology.device), self.topology))
            self._output = RUNS / (self._name if chosen == 1 else f"{self._name}-{chosen}")
        return self._output

    def setup(
        self,
        model: nn.Module,
        weights: Weights,
        optimizer: OptimizerSettings,
        tokenizer: Any = None,
        *,
        packed: bool = False,
        masks: Masks | None = None,
        teacher: tuple[Distillation, Weights] | CachedTeacher | None = None,
    ) -> None:
        """Hand the model to the backend: from here on it is sharded. So is the `teacher` that it learns from, unless
        the windows bring what that says.

        What `masks` prune is zero from the start and after every update. Raises UserError where they are of another
        model, or the model or its teacher would get `packed` documents and can't keep them apart.
        """
        if self.recipe.train.qat is not None:
            round_layers(model, self.recipe.train.qat)
        self.module = make_trainable(model, seed=self.plan.seed, recompute=self.plan.recompute)
        if isinstance(teacher, tuple) and teacher[0].matching is not None:
            matching, projections = teacher[0].matching
            self.module.take_in(matching)
            weights = WithProjections(weights, projections)
        self.module.set_recompute(self.plan.recompute, self.plan.recompute_blocks)
        if self.plan.keep_freed:
            keep_freed()
        if self.plan.compile:
            self.module.compile_blocks()
        if packed:
            refuse_packing(self.module)
            if isinstance(teacher, tuple):
                refuse_packing(teacher[0].teacher)
        self.module.train()
        self._tokenizer = tokenizer
        if masks:
            self.masks = masks.checked(self.module.shapes, self.module.aliases)
            zero_pruned(self.module, self.masks)
            weights = MaskedWeights(weights, self.masks)
        backend = make_backend(self.plan)
        self.base_bytes = self.meter.current_bytes()  # the libraries, before the model
        job = Job(self.module, self.plan, optimizer, self.topology, self._disk(), masks=self.masks)
        backend.prepare(job, weights)
        self._backend = backend
        if isinstance(teacher, tuple):
            backend.hold_teacher(*teacher)
            self.module.distillation = teacher[0]
        elif teacher is not None:
            self.module.distillation = teacher
        self.module.check_tie()
        check_buffers(self.module, self.topology)
        if self.recipe.train.trackers:
            directory = self.output
            if self.topology.is_main:
                self.callbacks.append(Trackers(self.recipe, directory))
        for callback in self.callbacks:
            callback.on_start(self)

    def _disk(self) -> Path | None:
        """Where the backend keeps what it has on the disk; None: nothing."""
        if self.plan.backend == "stream":
            return stream_directory(self.plan, self.output)
        if self.plan.offload.activations == "disk":
            return self.output if self.plan.offload.directory is None else Path(self.plan.offload.directory)
        return None

    @property
    def backend(self) -> Backend:
        """What carries the plan out. Raises RuntimeError before there is a model."""
        if self._backend is None:
            raise RuntimeError("the engine has no model yet: call prepare")
        return self._backend

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Mapping[str, Tensor]],
        *,
        masks: Mapping[str, Tensor] | None = None,
    ) -> tuple[Trainable, Any, Iterator[Window]]:
        """For a user's own loop: (the sharded model, its optimizer, an iterator of windows).

        The optimizer that comes back is of the given one's kind, options and groups, over the sharded parameters; the
        given one is emptied, for it would hold tensors that are no longer trained. The rate follows the recipe's
        schedule, its peak being the given optimizer's. `loader` yields this rank's batches (`input_ids` and `labels`
        as for transformers). `masks` say by parameter which of its elements stay (booleans of its shape): the others
        are zero from here on, and what is saved says so.
        """
        if self.plan.stream.memory_limit is not None:
            raise UserError(
                "shard.memory_limit can't be kept in a loop of your own, whose rows and model are not the recipe's: "
                "leave it out, or train by `shardlab train`"
            )
        if self.recipe.distill is not None:
            raise UserError("distill is for `shardlab train` and `shardlab distill`, not for a loop of your own")
        settings = like(optimizer, model)
        self.peak_learning_rate = float(optimizer.defaults["lr"])
        self._source = ModelSection()  # not the recipe's model
        self.setup(model, ModuleWeights(model), settings, masks=Masks.of(masks or {}))
        optimizer.state.clear()
        optimizer.param_groups.clear()
        return self.module, self.backend.optimizer, self._windows(loader)

    def _windows(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Window]:
        """Of a run that goes on, those that are left: what was trained on is read and passed over."""
        accumulation, done = self.plan.accumulation, self.steps_done  # of the moment when the first is asked for
        left = islice(loader, done * accumulation, None)
        yield from windows_of(left, self.topology, accumulation=accumulation, start_step=done)

    def step(self, window: Window) -> float | None:
        """Forward, token-weighted loss, backward, clip, update. The loss; see `run` for the rest."""
        return self.run(window).loss

    def run(self, window: Window) -> StepResult:
        """One optimizer step. Raises NonFiniteError by policy, RuntimeError where the first step changes nothing."""
        started, lr = time.perf_counter(), self.learning_rate()
        loss, norm, skipped = None, None, True
        if window.tokens:  # without any, an update would still decay the weights; every rank knows it without asking
            check_documents(self.module, window.micro_batches)
            try:
                applied = self.backend.run_window(window, lr)
            except RuntimeError as error:
                # torch's own messages of a failed collective say neither which step nor which rank.
                raise RuntimeError(f"step {window.step + 1}, rank {self.topology.rank}: {error}") from error
            loss, norm, skipped = applied.loss_sum / applied.tokens, applied.grad_norm, applied.skipped
            self.applied += not skipped
            self.nonfinite_steps += skipped
            if self.applied == 1 and not skipped:
                check_changed(self.module, self.backend.unchanged_parameters(), self.masks, lr)
        self.steps_done = window.step + 1
        seconds = time.perf_counter() - started
        peak_bytes = self.meter.peak_bytes() if self.callbacks else None
        result = StepResult(loss, norm, lr, window.tokens, skipped, self.steps_done, seconds, peak_bytes)
        for callback in self.callbacks:  # also of a step that stops the run: it belongs in the log
            callback.on_step(self, result)
        if window.tokens and skipped and self.recipe.train.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {window.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}; the weights are "
                "those before this step. Lower train.optimizer.lr, or go on without it: train.on_nonfinite=skip",
                result,
            )
        return result

    def learning_rate(self) -> float:
        """The rate of the next update."""
        train = self.recipe.train
        return learning_rate(train.schedule, peak=self.peak_learning_rate, applied=self.applied, steps=train.steps)

    def evaluate(self, batches: Iterable[MicroBatch] | Iterable[Mapping[str, Tensor]]) -> tuple[float, int]:
        """(mean loss per token, tokens) over all ranks' batches, without dropout.

        Either micro-batches, of which every rank brings the same number, or a user's own batches, as `prepare` takes
        them, of which each rank has as many as it likes.
        """
        loss_sum, tokens = self.backend.evaluate(self._checked(batches))
        found = Evaluation(self.steps_done, loss_sum / tokens if tokens else math.nan, tokens)
        for callback in self.callbacks:
            callback.on_evaluate(self, found)
        return found.loss, found.tokens

    def _checked(self, batches: Iterable[MicroBatch] | Iterable[Mapping[str, Tensor]]) -> Iterator[MicroBatch]:
        for batch in batches_of(batches, self.topology):
            check_documents(self.module, [batch])
            yield batch

    def save(self, directory: str | Path | None = None, tokenizer: Any = None) -> Path:
        """Write a Hugging Face model directory (or an adapter directory), tensor by tensor. Every rank calls this.

        Without `directory` that is `model` in `output`. Returns where it was written. Raises RuntimeError that names
        the caller where not every rank comes within `shard.timeout_seconds`.
        """
        self.ranks.meet("save")
        chosen = self.output / "model" if directory is None else Path(directory)
        save_artifact(
            chosen,
            self.module,
            self.backend.tensors(),
            tokenizer or self._tokenizer,
            self.topology,
            self._source,
            self.masks,
        )
        return chosen

    def model_files(self) -> dict[str, bytes]:
        """What a model directory holds beside the weights (config, tokenizer, masks), by name."""
        return model_files(self.module, self._tokenizer, self._source, self.masks)

    def save_state(self, root: str | Path | None = None) -> Path:
        """Save a checkpoint to go on from, in `root` (without it `checkpoints` in `output`). Every rank calls this.

        Returns its directory, `step-…`, whole and verified by its hashes when older ones are deleted. Raises
        RuntimeError that names the caller where not every rank comes within `shard.timeout_seconds`.
        """
        self.ranks.meet("save_state")  # before anything else: where no directory was given, the ranks agree on one
        chosen = self.output / DIRECTORY if root is None else Path(root)
        if self._checkpoints is None or self._checkpoints.root != chosen:
            self._checkpoints = Checkpoints(self, chosen, self.ranks, own_loop_identity(self.recipe))
        return self._checkpoints.save_now()

    def load_state(self, resume: str | Path = "auto", *, reset_schedule: bool = False) -> int:
        """Go on from a checkpoint, saved by any backend at any world size; the number of steps that were done.

        After `prepare`, before the first step; every rank calls this. `resume` is a checkpoint, or what holds some, of
        which the newest whole one is taken; "auto" is this run's own, and 0 where there is none. Raises UserError
        where the state is of another model, optimizer or schedule (which `reset_schedule` allows).
        """
        found = find_resumption(str(resume), self.output, self.ranks, print)
        if found is not None:
            check_resumption(found, self, own_loop_identity(self.recipe), reset_schedule=reset_schedule)
            restore(self, found)
        return self.steps_done

    def close(self, error: BaseException | None = None) -> None:
        """Release the backend and end the callbacks, which are told of `error`. A second call does nothing."""
        # After a failure of this rank alone the others may be within a collective: waiting for the device to finish, as
        # DeepSpeed does, would wait for them.
        orderly = error is None or isinstance(error, UserError) or self.topology.world_size == 1
        with ExitStack() as stack:  # one that fails does not keep the others from ending
            if self._backend is not None and orderly:
                stack.callback(self._backend.close)
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_end, self, error)
        self._backend, self.callbacks = None, []
