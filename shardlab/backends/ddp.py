"""Every rank holds the whole model; gradients are summed over ranks. One process is this backend with one rank.

torch's DistributedDataParallel is not used: it can't accumulate and reduce the gradients of bf16 weights in fp32.
Gradients live in flat fp32 buckets from the start (each parameter's gradient is a view), the weights that compute may
be bf16, and a bucket is sent as soon as the last micro-batch's backward pass has filled it.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.backends.activations import keep_elsewhere
from shardlab.backends.base import (
    Applied,
    Job,
    all_reduce_sum,
    fingerprint,
    guarded,
    local_norms,
    move,
    scale_for_clipping,
    sum_dtype,
    sum_losses,
)
from shardlab.backends.masked import Owned, keep_zeros
from shardlab.backends.materialize import Materializer, hold_whole, move_buffers
from shardlab.backends.module_state import buffer_fragments, check_tensors, load_buffers
from shardlab.backends.optimizer import build_optimizer, set_learning_rate
from shardlab.backends.optimizer_state import make_state, moments, owners, read_state
from shardlab.data.window import MicroBatch, Window
from shardlab.model.deferred import Weights
from shardlab.model.teacher import Distillation
from shardlab.state.box import whole
from shardlab.state.fragment import FROZEN, MASTER, Fragment, OptimizerState, StateReader
from shardlab.state.held import Held, fragments_of, read_held

BUCKET_BYTES = 25 * 1024**2  # as DistributedDataParallel: large enough for bandwidth, small enough to overlap


class DDPBackend:
    """See `Backend`."""

    def prepare(self, job: Job, weights: Weights) -> None:
        """See `Backend.prepare`."""
        self._job = job
        self._device = torch.device(job.topology.device)
        self._mixed = job.plan.precision == "bf16"
        self._shelves = keep_elsewhere(job)
        module = job.module
        # Masters are made before the weights that compute: they keep the initial values' fp32 bits.
        frozen = torch.bfloat16 if self._mixed else torch.float32
        Materializer(module, weights, self._device, frozen=frozen).materialize(module)
        move_buffers(module, self._device)
        names = [name for name, _ in module.named_trainables()]
        masters = [parameter for _, parameter in module.named_trainables()]
        if self._mixed:
            masters = _split_masters(module)
        self._weights = [parameter for _, parameter in module.named_trainables()]
        self._masters = masters
        self._names = names
        self._buckets = GradientBuckets(self._weights, masters, job.topology.world_size, self._device)
        # A head that nothing else uses has all its gradient after the forward pass; a tied one arrives with the
        # embedding.
        self._direct_head: Tensor | None = None
        if module.tail is not None and module.tail.head.weight.requires_grad:
            head = module.tail.head.weight
            module.tail.weight_gradient = self._buckets.gradient(head)
            self._direct_head = None if module.tied else head
        self.optimizer: Optimizer = build_optimizer(job.optimizer, zip(names, masters, strict=True))
        keep_zeros(self.optimizer, job.masks, self._owned)
        self._unchanged: list[str] | None = None

    def _owned(self) -> Iterator[Owned]:
        for name, master in zip(self._names, self._masters, strict=True):
            yield Owned(master, name, 0, master)

    def hold_teacher(self, distillation: Distillation, weights: Weights) -> None:
        """See `Backend.hold_teacher`."""
        hold_whole(distillation.teacher, weights, self._device, self._job.plan)

    def run_window(self, window: Window, lr: float) -> Applied:
        """See `Backend.run_window`."""
        topology = self._job.topology
        loss = self._accumulate(window)
        self._buckets.finish()
        norms = local_norms(self._buckets.gradients)
        # Gradients are the same on all ranks by now; the loss is not.
        all_reduce_sum(loss, topology)
        norm = float(norms.square().sum().sqrt())
        loss_sum = float(loss) * window.tokens
        skipped = not torch.isfinite(torch.tensor([norm, loss_sum])).all()
        if not skipped:
            scale = scale_for_clipping(norm, self._job.plan.clip_grad_norm)
            if scale is not None:
                torch._foreach_mul_(self._buckets.flats, scale)
            self._update(lr, norms)
        self._buckets.zero()
        return Applied(loss_sum, window.tokens, norm, skipped)

    def _accumulate(self, window: Window) -> Tensor:
        """Forward and backward over the window; this rank's loss sum / the global tokens, a scalar."""
        module = self._job.module
        loss = torch.zeros((), dtype=sum_dtype(self._device), device=self._device)
        for batch in window.micro_batches:
            module.random.step, module.random.micro_batch = window.step, batch.index
            self._buckets.sync = batch is window.micro_batches[-1]
            objective = module(move(batch, self._device), float(window.tokens))
            loss += objective.detach()
            if self._direct_head is not None:
                self._buckets.arrived(self._direct_head)
            guarded(objective).backward()
        return loss

    def _update(self, lr: float, norms: Tensor) -> None:
        set_learning_rate(self.optimizer, lr)
        first = self._unchanged is None
        before = [fingerprint(master) for master in self._masters] if first else []
        self.optimizer.step()
        if first:
            self._unchanged = [
                name
                for name, master, old, norm in zip(self._names, self._masters, before, norms.tolist(), strict=True)
                if norm > 0 and fingerprint(master) == old
            ]
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Make the weights that compute from the masters."""
        if self._mixed:
            torch._foreach_copy_([*self._weights], [*self._masters])

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """See `Backend.evaluate`."""
        return sum_losses(self._job.module, self._job.module, batches, self._job.topology)

    def unchanged_parameters(self) -> list[str]:
        """See `Backend.unchanged_parameters`."""
        return self._unchanged or []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`."""
        for name, parameter in self._job.module.named_canonical():
            yield name, parameter.detach().cpu()

    def _held(self) -> Iterator[Held]:
        """Every tensor whole, as every other rank."""
        masters = dict(zip(self._names, self._masters, strict=True))
        for name, parameter in self._job.module.named_canonical():
            shape = tuple(parameter.shape)
            box = whole(shape)
            if box is None:
                continue
            states = {FROZEN: parameter.detach()}
            if name in masters:
                states = {MASTER: masters[name].detach(), **moments(self.optimizer, masters[name])}
            yield Held(name, shape, box, states)

    def fragments(self) -> Iterator[Fragment]:
        """See `Backend.fragments`."""
        topology = self._job.topology
        yield from fragments_of(list(self._held()), topology.rank, topology.world_size)
        yield from buffer_fragments(self._job.module, topology)

    def optimizer_state(self) -> OptimizerState:
        """See `Backend.optimizer_state`."""
        return read_state(self.optimizer, owners(self.optimizer))

    def load(self, reader: StateReader) -> None:
        """See `Backend.load`."""
        check_tensors(self._job.module, reader)
        make_state(self.optimizer, owners(self.optimizer), reader)
        read_held(self._held(), reader)
        load_buffers(self._job.module, reader)
        self._publish()

    def close(self) -> None:
        """See `Backend.close`."""
        self._buckets.close()
        if self._shelves is not None:
            self._shelves.close()


def _split_masters(module: nn.Module) -> list[nn.Parameter]:
    """Make the floating-point weights bf16 in place; return fp32 masters of the trainable ones, in order."""
    masters: list[nn.Parameter] = []
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.requires_grad:
            masters.append(nn.Parameter(parameter.data))
        parameter.data = parameter.data.to(torch.bfloat16)
    return masters


class GradientBuckets:
    """Flat fp32 gradients of `weights`, filled by autograd, and their sum over ranks.

    `masters[i].grad` and the gradient that autograd adds to for `weights[i]` are the same view of a bucket.
    """

    def __init__(self, weights: list[nn.Parameter], masters: list[nn.Parameter], world_size: int, device: torch.device):
        self.flats: list[Tensor] = []
        self.gradients: list[Tensor] = [torch.empty(0)] * len(weights)
        self.sync = False  # whether the backward pass under way is the window's last
        self._world_size = world_size
        self._bucket_of: dict[int, int] = {}
        self._waiting: list[set[int]] = []
        self._works: list[dist.Work] = []
        self._index = {id(weight): i for i, weight in enumerate(weights)}
        # Backward order is about the reverse of the parameters' order: the first bucket to be full is the first to go.
        for members in _fill(list(reversed(range(len(weights)))), weights):
            self._add_bucket(members, weights, device)
        self._hooks = [weight.register_post_accumulate_grad_hook(self.arrived) for weight in weights]
        for weight, master, gradient in zip(weights, masters, self.gradients, strict=True):
            weight.grad_dtype = torch.float32  # autograd casts and adds up in fp32, also for bf16 weights
            weight.grad = gradient
            if master is not weight:
                master.grad = gradient
        self._left: list[set[int]] = [set(members) for members in self._waiting]

    def _add_bucket(self, members: list[int], weights: list[nn.Parameter], device: torch.device) -> None:
        flat = torch.zeros(sum(weights[i].numel() for i in members), dtype=torch.float32, device=device)
        offset = 0
        for i in members:
            self.gradients[i] = flat[offset : offset + weights[i].numel()].view_as(weights[i])
            offset += weights[i].numel()
            self._bucket_of[i] = len(self.flats)
        self.flats.append(flat)
        self._waiting.append(set(members))

    def gradient(self, weight: Tensor) -> Tensor:
        """The fp32 buffer that `weight`'s gradient is added up in, shaped like it."""
        return self.gradients[self._index[id(weight)]]

    def arrived(self, weight: Tensor) -> None:
        """`weight`'s gradient is complete. Buckets go out in their own order, so that all ranks send the same ones."""
        if not self.sync or self._world_size == 1:
            return
        index = self._index[id(weight)]
        self._left[self._bucket_of[index]].discard(index)
        while len(self._works) < len(self.flats) and not self._left[len(self._works)]:
            self._send_next()

    def _send_next(self) -> None:
        self._works.append(dist.all_reduce(self.flats[len(self._works)], async_op=True))

    def finish(self) -> None:
        """Send the buckets that are not complete (parameters without a gradient in this window) and wait for all."""
        if self._world_size == 1:
            return
        while len(self._works) < len(self.flats):
            self._send_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._left = [set(members) for members in self._waiting]

    def zero(self) -> None:
        """Ready for the next window."""
        torch._foreach_zero_(self.flats)

    def close(self) -> None:
        """Take the hooks off the weights."""
        for hook in self._hooks:
            hook.remove()


def _fill(order: list[int], weights: list[nn.Parameter]) -> Iterator[list[int]]:
    """Cut `order` into buckets of at most `BUCKET_BYTES` (or one larger tensor)."""
    members: list[int] = []
    size = 0
    for i in order:
        size_of = weights[i].numel() * 4
        if members and size + size_of > BUCKET_BYTES:
            yield members
            members, size = [], 0
        members.append(i)
        size += size_of
    if members:
        yield members
