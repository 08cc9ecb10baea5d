"""DeepSpeed ZeRO: stage 1 shards optimizer state, stage 2 gradients too, stage 3 parameters too.

The engine is made by `deepspeed.initialize` from a config that is written out whole (`zero_config`): what DeepSpeed
is not told it decides by itself, clipping included. Accelerate's plugin is left out, because on CPU it reports one
process on every rank and exchanges the optimizer (see docs/decisions.md).
"""

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch._inductor.compile_fx  # DeepSpeed imports it in its first step: 41 MiB of libraries, not of the model
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor, nn

from shardlab.backends.activations import keep_elsewhere
from shardlab.backends.base import (
    Applied,
    Job,
    all_reduce_sum,
    ensure_process_group,
    fingerprint,
    guarded,
    move,
    sum_dtype,
    sum_losses,
)
from shardlab.backends.masked import Owned, keep_zeros
from shardlab.backends.materialize import Materializer, hold_whole, move_buffers
from shardlab.backends.module_state import buffer_fragments, check_tensors, load_buffers
from shardlab.backends.optimizer import build_optimizer, set_learning_rate
from shardlab.backends.optimizer_state import make_state, moments, read_state
from shardlab.backends.zero_config import deepspeed_config
from shardlab.backends.zero_state import ZeROState
from shardlab.data.window import MicroBatch, Window
from shardlab.model.deferred import Weights
from shardlab.model.teacher import Distillation
from shardlab.plan import Plan
from shardlab.runtime.extensions import without_shm_comm
from shardlab.state.fragment import Fragment, OptimizerState, StateReader
from shardlab.state.held import fragments_of, read_held

_LINEAR = torch.nn.functional.linear  # stage 3 replaces it for the whole process


class ZeROBackend:
    """See `Backend`."""

    def prepare(self, job: Job, weights: Weights) -> None:
        """See `Backend.prepare`."""
        self._job = job
        self._device = torch.device(job.topology.device)
        self._stage = int(job.plan.backend[-1])
        self._shelves = keep_elsewhere(job)
        _start_deepspeed(job)
        config = deepspeed_config(job.plan, [parameter.numel() for parameter in job.module.parameters()])
        self._materialize(config, weights)
        optimizer = build_optimizer(job.optimizer, job.module.named_trainables())
        self._engine: Any
        self._teacher: Any = None
        with _buffers_kept(job.module, self._device):
            self._engine, *_ = deepspeed.initialize(
                model=job.module, optimizer=optimizer, config=config, dist_init_required=False
            )
        self.optimizer = self._engine.optimizer
        self._state = ZeROState(self.optimizer, job.module, self._stage, job.topology.rank)
        keep_zeros(self.optimizer.optimizer, job.masks, self._owned)
        if job.plan.precision == "bf16":
            self._write_masters(weights)
        self._unchanged: list[str] | None = None

    def hold_teacher(self, distillation: Distillation, weights: Weights) -> None:
        """See `Backend.hold_teacher`: an engine of its own, without an optimizer, where parameters are sharded."""
        plan, teacher = self._job.plan, distillation.teacher
        if self._stage < 3:
            hold_whole(teacher, weights, self._device, plan)
            return
        frozen = replace(plan, offload=replace(plan.offload, optimizer="none"))
        config = deepspeed_config(frozen, [parameter.numel() for parameter in teacher.parameters()])
        materializer = Materializer(teacher, weights, self._device, _computing(plan))
        for unit in teacher.units:
            materializer.materialize(unit)
            deepspeed.zero.Init(module=unit, config_dict_or_path=config)
        move_buffers(teacher, self._device)
        with _buffers_kept(teacher, self._device):
            self._teacher, *_ = deepspeed.initialize(model=teacher, config=config, dist_init_required=False)
        head = list(teacher.head.parameters())
        distillation.run = self._teacher
        distillation.whole = lambda: deepspeed.zero.GatheredParameters(head)

    def _materialize(self, config: dict[str, Any], weights: Weights) -> None:
        """Stage 3: one unit after another, each partitioned at once. Below, every rank holds the parameters whole."""
        module = self._job.module
        # Stage 3 takes the parameters' type as it finds it; below, the engine casts what is trained.
        frozen = _computing(self._job.plan)
        dtype = frozen if self._stage == 3 else torch.float32
        materializer = Materializer(module, weights, self._device, dtype, frozen)
        units = [*module.blocks, *([module.tail] if module.tail is not None else []), module]
        for unit in units if self._stage == 3 else [module]:
            materializer.materialize(unit)
            if self._stage == 3:
                deepspeed.zero.Init(module=unit, config_dict_or_path=config)
        if self._stage == 3 and module.tail is not None:
            # HeadLoss uses the head's tensors without calling the head: so they are gathered once, for all its chunks.
            # (Not as a "leaf module": that reduces a tied head's gradient before the embedding has added its part.)
            for parameter in module.tail.head.parameters():
                deepspeed.zero.register_external_parameter(module.tail, parameter)
        move_buffers(module, self._device)

    def _owned(self) -> Iterator[Owned]:
        for part in self._state.parts():
            yield Owned(part.flat, part.name, part.start, part.of(part.flat))

    @torch.no_grad()
    def _write_masters(self, weights: Weights) -> None:
        """Give the fp32 masters their initial values' own digits: DeepSpeed has made them from the bf16 weights."""
        for part in self._state.parts():
            value = weights.tensor(part.name).flatten()
            part.of(part.flat).copy_(value[part.start : part.start + part.numel])

    def run_window(self, window: Window, lr: float) -> Applied:
        """See `Backend.run_window`."""
        module, engine, world = self._job.module, self._engine, self._job.topology.world_size
        loss = torch.zeros((), dtype=sum_dtype(self._device), device=self._device)
        for batch in window.micro_batches:
            module.random.step, module.random.micro_batch = window.step, batch.index
            engine.set_gradient_accumulation_boundary(batch is window.micro_batches[-1])
            objective = engine(move(batch, self._device), float(window.tokens))
            loss += objective.detach()
            # DeepSpeed averages over ranks and would divide by the accumulation: both are undone.
            with _stack_as_it_was():
                engine.backward(guarded(objective) * world, scale_wrt_gas=False)
        set_learning_rate(engine.optimizer, lr)
        first = self._unchanged is None
        before = self._fingerprints() if first else {}
        engine.step()
        all_reduce_sum(loss, self._job.topology)
        norm = float(engine.get_global_grad_norm())
        skipped = not engine.was_step_applied()
        if first and not skipped:
            self._unchanged = self._find_unchanged(before)
        return Applied(float(loss) * window.tokens, window.tokens, norm, skipped)

    def _fingerprints(self) -> dict[str, int]:
        return {part.name: fingerprint(part.of(part.flat)) for part in self._state.parts()}

    def _find_unchanged(self, before: dict[str, int]) -> list[str]:
        """Trainable tensors that no rank changed, though the optimizer has seen a gradient of them.

        An optimizer without moments keeps no trace of a gradient: then only a run that changes nothing at all is found.
        """
        names = [name for name, _ in self._job.module.named_trainables()]
        marks = torch.zeros(2, len(names), device=self._device)  # changed; saw a gradient
        inner = self.optimizer.optimizer
        for part in self._state.parts():
            index = names.index(part.name)
            marks[0, index] = fingerprint(part.of(part.flat)) != before[part.name]
            for moment in moments(inner, part.flat).values():
                marks[1, index] += bool(part.of(moment).any())
        all_reduce_sum(marks, self._job.topology)
        if not any(moments(inner, owner.tensor) for owner in self._state.owners()):
            return [] if bool(marks[0].any()) else names
        return [name for name, changed, seen in zip(names, *marks.tolist(), strict=True) if seen and not changed]

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """See `Backend.evaluate`."""
        totals = sum_losses(self._engine, self._job.module, batches, self._job.topology)
        # No backward pass follows: what was gathered ahead for one would stay gathered, or in flight.
        self._engine.empty_partition_cache()
        return totals

    def unchanged_parameters(self) -> list[str]:
        """See `Backend.unchanged_parameters`."""
        return self._unchanged or []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`."""
        for name, parameter in self._job.module.named_canonical():
            with self._gathered(parameter):
                whole = parameter.detach().cpu().clone()
            yield name, whole

    def fragments(self) -> Iterator[Fragment]:
        """See `Backend.fragments`."""
        topology, frozen = self._job.topology, list(self._state.frozen())
        yield from fragments_of(list(self._state.trained()))
        if self._stage == 3:
            yield from fragments_of(frozen)
        else:
            yield from fragments_of(frozen, topology.rank, topology.world_size)
        yield from buffer_fragments(self._job.module, topology)

    def optimizer_state(self) -> OptimizerState:
        """See `Backend.optimizer_state`."""
        return read_state(self.optimizer.optimizer, self._state.owners())

    def load(self, reader: StateReader) -> None:
        """See `Backend.load`."""
        check_tensors(self._job.module, reader)
        make_state(self.optimizer.optimizer, self._state.owners(), reader)
        read_held(self._state.trained(), reader)
        read_held(self._state.frozen(), reader)
        load_buffers(self._job.module, reader)
        if self._device.type == "cpu" and self._job.topology.nodes == 1:
            self._state.reload(reader)
        else:
            self._state.publish()

    def _gathered(self, parameter: nn.Parameter) -> contextlib.AbstractContextManager[Any]:
        if self._stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters([parameter])

    def close(self) -> None:
        """See `Backend.close`."""
        if self._teacher is not None:
            self._teacher.destroy()
        self._engine.destroy()
        if self._shelves is not None:
            self._shelves.close()
        torch.nn.functional.linear = _LINEAR


def _computing(plan: Plan) -> torch.dtype:
    return torch.bfloat16 if plan.precision == "bf16" else torch.float32


@contextlib.contextmanager
def _buffers_kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """DeepSpeed casts a whole module to bf16 when it takes it over: rotary frequencies would lose their digits.

    Its bf16 optimizer prints memory figures of the whole host then; nobody needs them.
    """
    buffers = {name: buffer.to(device) for name, buffer in module.named_buffers()}
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer


@contextlib.contextmanager
def _stack_as_it_was() -> Iterator[None]:
    """Stage 3 notes each module that is entered, for the process, and crosses it off when it is left.

    Recompute leaves its last module by an exception. (Made to leave it in order, it gives the module's weights back
    before their gradient is there, and that fails.) Without this the list would grow with each micro-batch.
    """
    depth = len(parameter_offload.FWD_MODULE_STACK)
    yield
    del parameter_offload.FWD_MODULE_STACK[depth:]


def _start_deepspeed(job: Job) -> None:
    """DeepSpeed's own communication layer on top of the process group that there is."""
    # It warns of each optimizer that is not its own, and calls collectives by names that torch has since replaced.
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    ensure_process_group(job.topology)
    if job.topology.device_type == "cpu":
        without_shm_comm()
    if not deepspeed.comm.is_initialized():
        backend = "gloo" if job.topology.device_type == "cpu" else None
        deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)
