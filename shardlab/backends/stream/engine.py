"""The backend for state larger than memory: it lies in files, and passes through memory segment by segment.

A window is run segment-major (see `passes`). Its gradients wait in files; the update is applied when a segment is next
read, by when the whole window's norm is known: clipping is exact, and a window that is not finite changes nothing.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.backends.activations import DiskShelves
from shardlab.backends.base import Applied, Job, count_targets, move, scale_for_clipping
from shardlab.backends.materialize import move_buffers
from shardlab.backends.optimizer import build_optimizer, set_learning_rate
from shardlab.backends.stream.binding import Binding
from shardlab.backends.stream.boundaries import Boundaries
from shardlab.backends.stream.encoding import Format
from shardlab.backends.stream.footprint import recomputed
from shardlab.backends.stream.layout import lay_out
from shardlab.backends.stream.passes import Machinery, Pass
from shardlab.backends.stream.pipeline import Pipeline, Traffic
from shardlab.backends.stream.record import Pending
from shardlab.backends.stream.spill import Spill
from shardlab.backends.stream.state import StoredState
from shardlab.backends.stream.store import Store
from shardlab.backends.stream.update import Update
from shardlab.data.window import MicroBatch, Window
from shardlab.errors import UserError
from shardlab.model.deferred import Weights
from shardlab.model.shape import model_shape
from shardlab.model.teacher import Distillation
from shardlab.model.trainable import CausalLM, Trainable
from shardlab.plan import ModelShape
from shardlab.state.fragment import Fragment, OptimizerState, StateReader


class StreamBackend:
    """See `Backend`. One process."""

    def prepare(self, job: Job, weights: Weights) -> None:
        """See `Backend.prepare`."""
        module = _supported(job)
        shape = model_shape(module)
        _refuse_shared(module, shape)
        self._job = job
        self._device = torch.device(job.topology.device)
        dtype = torch.bfloat16 if job.plan.precision == "bf16" else torch.float32
        layout = lay_out(shape)
        binding = Binding(module, self._device, dtype)
        move_buffers(module, self._device)
        module.set_recompute("none")  # every block is run again from its input as it is
        self.optimizer: Optimizer = build_optimizer(job.optimizer, module.named_trainables())
        self._update = update = Update(self.optimizer, layout, job.masks)
        directory = job.directory or Path(tempfile.mkdtemp(prefix="shardlab-stream-"))
        kept = job.plan.stream
        form = Format(len(update.kinds), dtype, kept.masters, kept.moments, kept.gradients)
        self._store = Store(directory, layout, form, _identity(shape, update, dtype, form), resume=job.resume)
        self._pipeline = Pipeline(self._store, update, self._device, dtype)
        self._state = StoredState(self._store, self._pipeline, module, update, self.optimizer)
        if job.resume:
            update.steps = self._store.record.note["steps"]
        else:
            self._state.initialise(lambda name: binding.take_initial(name, weights))
            self._begin()
        self._spill, again = None, recomputed(job.plan, len(layout.blocks))
        if again < len(layout.blocks):
            offload = job.plan.offload
            where = directory if offload.directory is None else Path(offload.directory)
            shelves = DiskShelves(where, self._device, offload.disk_limit)
            self._spill = Spill(module, again, shelves, torch.zeros(1, dtype=dtype, device=self._device))
        self._boundaries = Boundaries(directory / "activations", again, job.plan.stream.activation_bytes)
        self._on = Machinery(
            module, layout, self._pipeline, binding, self._boundaries, self._device, dtype, self._spill
        )
        # Tensors whose gradient was not zero in the first window that was applied.
        self._moved: set[str] | None = set() if job.resume else None

    def hold_teacher(self, distillation: Distillation, weights: Weights) -> None:
        """See `Backend.hold_teacher`."""
        raise UserError("distill: backend stream holds no teacher beside the model it trains: set distill.cache")

    def run_window(self, window: Window, lr: float) -> Applied:
        """See `Backend.run_window`."""
        module = self._on.module
        module.random.step = window.step
        batches = [move(batch, self._device) for batch in window.micro_batches]
        run = Pass(self._on, batches, [batch.index for batch in window.micro_batches], float(window.tokens))
        loss_sum = float(run.train()) * window.tokens
        norms = {name: float(torch.stack(parts).square().sum().sqrt()) for name, parts in run.norms.items()}
        norm = sum(value**2 for value in norms.values()) ** 0.5 if norms else float("nan")
        skipped = not torch.isfinite(torch.tensor([norm, loss_sum])).all()
        pending = None
        if not skipped:
            set_learning_rate(self.optimizer, lr)  # for who looks at it; the rate itself waits with the update
            pending = Pending(lr, scale_for_clipping(norm, self._job.plan.clip_grad_norm))
            if self._moved is None:
                self._moved = {name for name, value in norms.items() if value > 0}
        self._store.commit_window(pending, {**self._store.record.note, "step": window.step + 1})
        return Applied(loss_sum, window.tokens, norm, skipped)

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far, and seconds that computing waited for them."""
        return self._pipeline.traffic

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """See `Backend.evaluate`."""
        module, source = self._on.module, iter(batches)
        together = 1
        total, tokens = 0.0, 0
        module.eval()
        while group := [move(batch, self._device) for batch in islice(source, together)]:
            together = self._together(group[0]["input_ids"])
            total += float(Pass(self._on, group, range(len(group)), 1.0).evaluate())
            tokens += sum(int(count_targets(tensors)) for tensors in group)
        module.train()
        return total, tokens

    def _together(self, tokens: Tensor) -> int:
        """How many micro-batches shaped as this one an evaluation takes through the segments at once."""
        plan, module = self._job.plan, self._on.module
        budget, table = plan.stream.activation_bytes, module.table
        if budget is None:
            # Of the blocks' inputs one is kept, not one for each block: so many more take no more memory.
            return plan.accumulation * max(1, len(module.blocks) // 2)
        assert isinstance(table, nn.Embedding)
        hidden = tokens.numel() * table.weight.shape[1] * self._on.dtype.itemsize
        mask = tokens.numel() * tokens.shape[1]
        return max(plan.accumulation, budget // (3 * hidden + mask))

    def unchanged_parameters(self) -> list[str]:
        """See `Backend.unchanged_parameters`. Applies the update that waits."""
        if self._moved is None:
            return []
        if self._pipeline.changed is None and self._store.record.updates == 1:
            self._pipeline.changed = {}
            self._pipeline.apply_pending()
        changed = self._pipeline.changed or {}
        return [name for name in self._moved if not changed.get(name, True)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`."""
        return self._state.tensors()

    def fragments(self) -> Iterator[Fragment]:
        """See `Backend.fragments`."""
        return self._state.fragments(self._job.topology)

    def optimizer_state(self) -> OptimizerState:
        """See `Backend.optimizer_state`."""
        return self._state.optimizer_state()

    def load(self, reader: StateReader) -> None:
        """See `Backend.load`."""
        self._state.load(reader)
        self._begin()

    def _begin(self) -> None:
        self._store.begin({"step": 0, "steps": dict(self._update.steps)})

    @property
    def windows_done(self) -> int:
        """After a resume: the step of the next window."""
        return int(self._store.record.note["step"])

    def close(self) -> None:
        """See `Backend.close`. The files go."""
        self._pipeline.close()
        self._boundaries.close()
        if self._spill is not None:
            self._spill.close()
        self._store.close(remove=True)


def _supported(job: Job) -> CausalLM:
    """Raises UserError for what can't be streamed."""
    module = job.module
    if job.plan.world_size != 1:
        raise UserError(
            f"shard.backend stream is for one rank, and this job has {job.plan.world_size}: start one, or set "
            "shard.backend=fsdp"
        )
    if not isinstance(module, CausalLM):
        raise UserError(
            f"shard.backend stream needs a causal language model with a list of blocks; {module.architecture} is none: "
            "set shard.backend=ddp"
        )
    if not isinstance(module.table, nn.Embedding):
        raise UserError(
            f"shard.backend stream can't read {module.architecture}'s embedding by rows: it is a "
            f"{type(module.table).__name__}, not an nn.Embedding (adapters on it are not possible here)"
        )
    odd = next((name for name, parameter in module.named_canonical() if not parameter.is_floating_point()), None)
    if odd is not None:
        raise UserError(f"shard.backend stream holds floating-point tensors only, and {odd} is of integers")
    return module


def _refuse_shared(module: Trainable, shape: ModelShape) -> None:
    """Raises UserError where two segments use one tensor, other than the head tied to the embedding."""
    seen: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in module.named_canonical()}
    for number, block in enumerate(module.blocks):
        for parameter in block.parameters():
            if seen.setdefault(id(parameter), number) != number or names[id(parameter)] in (shape.table, shape.head):
                raise UserError(
                    f"shard.backend stream needs blocks of their own weights; {names[id(parameter)]} is in several: "
                    "set shard.backend=ddp"
                )


def _identity(shape: ModelShape, update: Update, dtype: torch.dtype, form: Format) -> dict[str, str]:
    """What a store of this run can be told by."""
    tensors = ";".join(f"{p.name}{list(p.shape)}{p.trainable}" for p in shape.parameters)
    return {
        "tensors": hashlib.blake2b(tensors.encode(), digest_size=16).hexdigest(),
        "optimizer": ",".join(update.kinds),
        "precision": str(dtype).removeprefix("torch."),
        "form": f"{form.masters} masters, {form.moments} moments, {form.gradients} gradients",
    }
