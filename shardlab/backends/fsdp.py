"""Parameters, gradients and optimizer state sharded over all ranks: torch's `fully_shard` (FSDP2) on a device mesh.

Accelerate is not asked to do it: on a CPU it silently turns FSDP into DDP, or into nothing (see docs/decisions.md). The
same path runs on CPU and GPU; but CPU ranks of one host exchange through shared memory.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.backends.activations import keep_elsewhere
from shardlab.backends.base import (
    Applied,
    Job,
    all_reduce_sum,
    ensure_process_group,
    fingerprint,
    guarded,
    local_norms,
    move,
    scale_for_clipping,
    sum_dtype,
    sum_losses,
)
from shardlab.backends.masked import Owned, keep_zeros
from shardlab.backends.materialize import Materializer, move_buffers
from shardlab.backends.module_state import buffer_fragments, check_tensors, load_buffers
from shardlab.backends.optimizer import build_optimizer, set_learning_rate
from shardlab.backends.optimizer_state import make_state, moments, owners, read_state
from shardlab.backends.shared_memory import SharedMemory
from shardlab.data.window import MicroBatch, Window
from shardlab.errors import UserError
from shardlab.model.deferred import Weights
from shardlab.model.teacher import Distillation
from shardlab.plan import Plan
from shardlab.state.box import Box
from shardlab.state.fragment import FROZEN, MASTER, Fragment, OptimizerState, StateReader
from shardlab.state.held import Held, fragments_of, read_held


class FSDPBackend:
    """See `Backend`."""

    def prepare(self, job: Job, weights: Weights) -> None:
        """See `Backend.prepare`."""
        self._job = job
        self._device = torch.device(job.topology.device)
        self._shelves = keep_elsewhere(job)
        ensure_process_group(job.topology)
        self._shard(weights, _offload_policy(job.plan))
        move_buffers(job.module, self._device)
        named = list(job.module.named_trainables())
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.optimizer: Optimizer = build_optimizer(job.optimizer, named)
        keep_zeros(self.optimizer, job.masks, self._owned)
        self._unchanged: list[str] | None = None

    def hold_teacher(self, distillation: Distillation, weights: Weights) -> None:
        """See `Backend.hold_teacher`. A tree of its own: within the module's its units would be gathered backward."""
        plan, teacher = self._job.plan, distillation.teacher
        bf16 = plan.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16) if bf16 else MixedPrecisionPolicy()
        materializer = Materializer(teacher, weights, self._device, torch.bfloat16 if bf16 else torch.float32)
        mesh, offload = _mesh(plan, self._device), _offload_policy(plan)
        units: list[FSDPModule] = []
        sizes: list[_UnitSize] = []
        for unit in teacher.units:
            materializer.materialize(unit)
            sizes.append(_unit_size(unit, mesh.size(mesh.ndim - 1), bf16=bf16))
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload)
            assert isinstance(unit, FSDPModule)
            units.append(unit)
        move_buffers(teacher, self._device)
        if plan.shared_memory:
            self._shared += self._share_memory(mesh, units, sizes)
        head = teacher if teacher.tied else teacher.head
        assert isinstance(head, FSDPModule)
        distillation.whole = lambda: _gathered(head)

    def _shard(self, weights: Weights, offload: OffloadPolicy) -> None:
        """Materialise and shard one unit after another: no rank ever holds more than one unit whole."""
        job, module = self._job, self._job.module
        mesh = _mesh(job.plan, self._device)
        self._replica = 0 if job.plan.replicas == 1 else mesh.get_local_rank("replicate")
        bf16 = job.plan.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        materializer = Materializer(module, weights, self._device)
        self._units: list[FSDPModule] = []
        sizes: list[_UnitSize] = []

        def shard(unit: nn.Module, *, reshard: bool) -> FSDPModule:
            materializer.materialize(unit)
            sizes.append(_unit_size(unit, mesh.size(mesh.ndim - 1), bf16=bf16))
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
            assert isinstance(unit, FSDPModule)
            # The objective is divided by the global batch's tokens already: gradients are summed, not averaged.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            self._units.append(unit)
            return unit

        for block in module.blocks:
            shard(block, reshard=job.plan.reshard_after_forward)
        if module.tail is not None and not module.tied:
            # Its backward pass follows its forward pass at once: gathering it twice would be for nothing.
            shard(module.tail, reshard=False)
        if module.embedding is not None:
            shard(module.embedding, reshard=True).set_unshard_in_backward(False)  # which needs no weight
        shard(module, reshard=False)
        self._shared = self._share_memory(mesh, self._units, sizes) if job.plan.shared_memory else []

    def _share_memory(self, mesh: DeviceMesh, units: list[FSDPModule], sizes: "list[_UnitSize]") -> list[SharedMemory]:
        """Exchange through shared memory where all ranks that shard one copy of the model are on this host."""
        ranks = mesh.size(mesh.ndim - 1)
        if self._device.type != "cpu" or ranks == 1 or self._job.topology.local_world_size % ranks:
            return []
        shared = SharedMemory.join(
            mesh.get_group(mesh.ndim - 1),
            gathered=max(one.gathered for one in sizes),
            reduced=max(one.reduced for one in sizes),
            timeout_seconds=self._job.plan.timeout_seconds,
        )
        if shared is None:
            if self._job.topology.is_main:
                warnings.warn("the ranks of this host can't share memory: fsdp exchanges through gloo", stacklevel=2)
            return []
        for unit in units:
            shared.serve(unit)
        return [shared]

    def _owned(self) -> Iterator[Owned]:
        """This rank's rows of what is trained."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            local = _local(parameter)
            if local.numel():
                start = _rows(parameter, local).offsets[0] * (parameter.numel() // parameter.shape[0])
                yield Owned(parameter, name, start, local)

    def run_window(self, window: Window, lr: float) -> Applied:
        """See `Backend.run_window`."""
        module = self._job.module
        loss = torch.zeros(1, dtype=sum_dtype(self._device), device=self._device)
        for batch in window.micro_batches:
            module.random.step, module.random.micro_batch = window.step, batch.index
            objective = module(move(batch, self._device), float(window.tokens))
            loss += objective.detach()
            guarded(objective).backward()
        gradients = [_gradient(parameter) for parameter in self._parameters]
        # Replicas hold the same shards: each counts for its share.
        squares = local_norms(gradients).square().to(self._device) / self._job.plan.replicas
        shared = all_reduce_sum(torch.cat([loss, squares]), self._job.topology)
        loss_sum = float(shared[0]) * window.tokens
        norm = float(shared[1:].sum().sqrt())
        skipped = not bool(torch.isfinite(shared).all())
        if not skipped:
            scale = scale_for_clipping(norm, self._job.plan.clip_grad_norm)
            if scale is not None:
                torch._foreach_mul_(gradients, scale)
            self._update(lr, shared[1:])
        self.optimizer.zero_grad(set_to_none=True)
        return Applied(loss_sum, window.tokens, norm, skipped)

    def _update(self, lr: float, squares: Tensor) -> None:
        set_learning_rate(self.optimizer, lr)
        first = self._unchanged is None
        before = self._fingerprints() if first else []
        self.optimizer.step()
        if first:
            changed = torch.tensor(
                [float(old != new) for old, new in zip(before, self._fingerprints(), strict=True)], device=self._device
            )
            all_reduce_sum(changed, self._job.topology)
            self._unchanged = [
                name
                for name, moved, square in zip(self._names, changed.tolist(), squares.tolist(), strict=True)
                if square > 0 and not moved
            ]

    def _fingerprints(self) -> list[int]:
        return [fingerprint(_local(parameter)) for parameter in self._parameters]

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """See `Backend.evaluate`."""
        totals = sum_losses(self._job.module, self._job.module, batches, self._job.topology)
        self._reshard()
        return totals

    def unchanged_parameters(self) -> list[str]:
        """See `Backend.unchanged_parameters`."""
        return self._unchanged or []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`."""
        self._reshard()
        dtype = torch.bfloat16 if self._job.plan.precision == "bf16" else torch.float32
        for name, parameter in self._job.module.named_canonical():
            sharded = parameter.detach().to(self._device)
            assert isinstance(sharded, DTensor)
            whole = sharded.full_tensor().cpu()
            yield name, whole.to(dtype) if whole.is_floating_point() else whole

    def _held(self) -> Iterator[Held]:
        """This rank's rows of every tensor, which its replicas hold too."""
        for name, parameter in self._job.module.named_canonical():
            local = _local(parameter)
            if local.numel():
                states = {FROZEN: local}
                if parameter.requires_grad:
                    kinds = moments(self.optimizer, parameter)
                    states = {MASTER: local, **{kind: _local(state) for kind, state in kinds.items()}}
                yield Held(name, tuple(parameter.shape), _rows(parameter, local), states)

    def fragments(self) -> Iterator[Fragment]:
        """See `Backend.fragments`."""
        self._reshard()
        held = list(self._held())
        yield from fragments_of(held, self._replica, self._job.plan.replicas)
        yield from buffer_fragments(self._job.module, self._job.topology)

    def optimizer_state(self) -> OptimizerState:
        """See `Backend.optimizer_state`."""
        return read_state(self.optimizer, owners(self.optimizer))

    def load(self, reader: StateReader) -> None:
        """See `Backend.load`."""
        self._reshard()
        check_tensors(self._job.module, reader)
        make_state(self.optimizer, owners(self.optimizer), reader)
        read_held(self._held(), reader)
        load_buffers(self._job.module, reader)

    def _reshard(self) -> None:
        """Units that stay gathered after a forward pass without a backward pass would be read stale."""
        for unit in self._units:
            unit.reshard()

    def close(self) -> None:
        """See `Backend.close`."""
        self.optimizer.zero_grad(set_to_none=True)
        for shared in self._shared:
            shared.close()
        if self._shelves is not None:
            self._shelves.close()


@dataclass(frozen=True)
class _UnitSize:
    """Bytes of a unit's gathered parameters, and of its gradients when they are reduced."""

    gathered: int
    reduced: int


def _unit_size(unit: nn.Module, ranks: int, *, bf16: bool) -> _UnitSize:
    """Of what is not yet sharded with a unit inside it."""
    gathered = reduced = 0
    for parameter in unit.parameters():
        if isinstance(parameter, DTensor):
            continue
        elements = -(-parameter.shape[0] // ranks) * ranks * (parameter.numel() // max(1, parameter.shape[0]))
        gathered += elements * (2 if bf16 and parameter.is_floating_point() else parameter.element_size())
        reduced += elements * 4 if parameter.requires_grad else 0
    return _UnitSize(gathered, reduced)


@contextmanager
def _gathered(unit: FSDPModule) -> Iterator[None]:
    """The unit's own parameters whole inside; it has been run before, which is when FSDP2 sets itself up."""
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def _mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """All ranks in one axis, or replicas times the ranks that shard within each."""
    if plan.replicas == 1:
        return init_device_mesh(device.type, (plan.world_size,))
    shape = (plan.replicas, plan.world_size // plan.replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of the gradient; empty where the window gave none."""
    return _local(parameter)[:0] if parameter.grad is None else _local(parameter.grad)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _rows(parameter: nn.Parameter, local: Tensor) -> Box:
    """Where this rank's shard lies in the tensor: rows, as many on each rank but the last ones."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh  # its last axis is the one that shards
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    start = rows * mesh.get_local_rank(mesh.ndim - 1)
    return Box((start, *(0 for _ in local.shape[1:])), tuple(local.shape))


def _offload_policy(plan: Plan) -> OffloadPolicy:
    """Raises UserError where parameters and optimizer state are not together: FSDP2 moves all of them or none."""
    if plan.offload.parameters != plan.offload.optimizer:
        raise UserError(
            "shard.offload: fsdp moves parameters and optimizer state together; set both offload.parameters and "
            f"offload.optimizer to cpu, or both to none (now {plan.offload.parameters} and {plan.offload.optimizer})"
        )
    if plan.offload.parameters == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
