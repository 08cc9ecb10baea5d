"""What one micro-batch's forward and backward pass keeps alive and computes, from the real model on fake tensors.

The `Trainable` itself runs, with its own recompute and its chunked head, on tensors that have shapes and no memory; a
dispatch mode follows every storage from the operation that makes it to its last reference, so also what autograd saves
and for how long. Nothing here knows a family of models or an operator's rules, but for the few kernels of torch that
allocate inside (`_scratch`).

Blocks that are equal are traced three times (the first, one between, the last) and the others follow by addition: the
bytes that a block leaves behind are the same for each.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from shardlab.errors import UserError
from shardlab.model.grid import Grid
from shardlab.model.head import HeadLoss
from shardlab.model.shape import model_shape
from shardlab.model.trainable import Trainable
from shardlab.plan import ROOT, Bytes, Kind, Precision, Recompute, Span, Timeline
from shardlab.planner.plain import PlainLoop
from shardlab.planner.storages import Passage, Storages

# What becomes of a weight's gradient: added at once to a buffer that is there already; handed on as soon as it is
# whole; or kept until its unit's backward pass has ended. The last two are one trace: what is kept is a kind by itself.
Gradients = Literal["buffers", "each", "units"]

_TRACED_BLOCKS = 3


class Tracer:
    """Traces one module. It puts fake tensors in place of the module's own, so the module is of no other use after."""

    def __init__(self, module: Trainable):
        self._module = module
        self._blocks = len(module.blocks)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._repeats = _repeats(module)
        if self._repeats:
            _keep_three(module)
        taught = module.distillation
        self._holders: list[nn.Module] = [module]
        if taught is not None and taught.teacher is not None:
            self._holders.append(taught.teacher)
        self._buffers = [dict(holder.named_buffers()) for holder in self._holders]
        self._originals = [dict(holder.named_parameters(remove_duplicate=False)) for holder in self._holders]

    def timeline(
        self,
        batch: Mapping[str, Tensor],
        precision: Precision,
        gradients: Gradients,
        recompute: Recompute,
        *,
        away: bool = False,
    ) -> Timeline:
        """The spans of one micro-batch shaped as `batch`, in order; see `trace` for errors."""
        buffers = gradients == "buffers"
        return self.spans(self.trace(batch, precision, recompute, buffers=buffers, away=away), gradients)

    def spans(self, passages: list[Passage], gradients: Gradients) -> Timeline:
        """A trace as the spans of all blocks."""
        spans = [passage.span(without="gradients" if gradients == "each" else None) for passage in passages]
        if not self._repeats:
            return tuple(spans)
        return tuple(_extended(spans, self._blocks, keeps_output=isinstance(self._module, PlainLoop)))

    def trace(
        self,
        batch: Mapping[str, Tensor],
        precision: Precision,
        recompute: Recompute,
        *,
        buffers: bool,
        away: bool = False,
    ) -> list[Passage]:
        """One micro-batch shaped as `batch`, point by point; `buffers`: gradients have places of their own.

        `away`: what the blocks save is kept elsewhere.

        Raises UserError where the step can't run on fake tensors.
        """
        self._module.set_recompute(recompute)
        packed = "position_ids" in batch and _is_packed(batch)
        with self._mode, _documents_unseen(packed=packed):
            self._fake_parameters(torch.bfloat16 if precision == "bf16" else torch.float32)
            fake = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()}
            try:
                return _Run(self._module, buffers=buffers, away=away).passages(fake)
            except Exception as error:
                # A forward pass that looks at values, which a trace has not; a stand-in kernel with other rules.
                raise UserError(
                    f"the memory of {self._module.architecture} can't be predicted: its step has no trace without "
                    f"memory ({type(error).__name__}: {' '.join(str(error).split())[:80]})"
                ) from error

    def chunks(self, batch: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Rows of the chunks that the head is traced with: batches with the same ones differ by their size alone.

        None for a model that brings its own loss.
        """
        if isinstance(self._module, PlainLoop):
            return ()
        tail = self._module.tail
        return None if tail is None else tuple(rows.stop - rows.start for rows, _ in _ends(tail, batch["targets"]))

    def _fake_parameters(self, dtype: torch.dtype) -> None:
        made: dict[int, nn.Parameter] = {}
        for holder, originals, buffers in zip(self._holders, self._originals, self._buffers, strict=True):
            for name, original in originals.items():
                if id(original) not in made:
                    kind = dtype if original.is_floating_point() else original.dtype
                    made[id(original)] = nn.Parameter(
                        torch.empty(original.shape, dtype=kind), requires_grad=original.requires_grad
                    )
                owner, _, leaf = name.rpartition(".")
                holder.get_submodule(owner)._parameters[leaf] = made[id(original)]
            for name, buffer in buffers.items():
                owner, _, leaf = name.rpartition(".")
                fake = torch.empty(buffer.shape, dtype=buffer.dtype)
                holder.get_submodule(owner)._buffers[leaf] = fake


def _is_packed(batch: Mapping[str, Tensor]) -> bool:
    """Whether any row's positions start anew."""
    positions = batch["position_ids"]
    return bool((positions[:, 1:] != positions[:, :-1] + 1).any())


@contextmanager
def _documents_unseen(*, packed: bool) -> Iterator[None]:
    """Rows of one document each need no mask of their own; a fake tensor cannot say so, so it is said here."""
    find = masking_utils.find_packed_sequence_indices
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _repeats(module: Trainable) -> bool:
    """Whether the blocks are more than three, alike, and in a list that can be shortened; no teacher's are matched."""
    if len(module.blocks) <= _TRACED_BLOCKS or _block_list(module) is None or module.matching is not None:
        return False
    return len({_signature(block) for block in module.blocks}) == 1


def _signature(block: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    # Families give some layers another mask or window, in attributes of their own names.
    settings = tuple(
        sorted(
            (f"{prefix}.{name}", repr(value))
            for prefix, child in block.named_modules()
            for name, value in vars(child).items()
            if isinstance(value, bool | int | float | str | Grid | torch.dtype) and name != "layer_idx"
        )
    )
    return tuple(type(module) for module in block.modules()), shapes, settings


def _block_list(module: Trainable) -> nn.ModuleList | None:
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    return next((found for found in lists if list(found) == module.blocks), None)


def _keep_three(module: Trainable) -> None:
    blocks = _block_list(module)
    assert blocks is not None
    del blocks[2:-1]
    module.blocks = list(blocks)


def _extended(spans: list[Span], blocks: int, *, keeps_output: bool) -> Iterator[Span]:
    """The spans of `blocks` equal blocks from those of three."""
    extra = blocks - _TRACED_BLOCKS
    forward = {span.segment: span for span in spans if span.phase == "forward"}
    backward = {span.segment: span for span in spans if span.phase == "backward"}
    left = _difference(forward[3].entry, forward[2].entry)  # what a block leaves behind
    # What of that its backward pass does not free: keys and values that a plain loop's output holds.
    stays = _difference(left, _difference(backward[2].entry, backward[1].entry)) if keeps_output else {}
    for span in spans:
        shift, number = 0, span.segment
        if number >= _TRACED_BLOCKS:
            shift, number = extra, number + extra
        after = extra - shift if span.phase == "backward" else 0  # blocks left out whose backward pass has ended
        if span.segment != 2:
            yield _moved(_moved(span, number, left, shift), number, stays, after)
        else:
            order = range(extra + 1) if span.phase == "forward" else reversed(range(extra + 1))
            for index in order:
                one = _moved(span, 2 + index, left, index)
                yield _moved(one, 2 + index, stays, extra - index if span.phase == "backward" else 0)


def _difference(one: Bytes, other: Bytes) -> dict[Kind, int]:
    return {kind: one.get(kind, 0) - other.get(kind, 0) for kind in {**one, **other}}


def _moved(span: Span, number: int, left: Bytes, times: int) -> Span:
    def add(to: Bytes) -> Bytes:
        return {kind: to.get(kind, 0) + times * left.get(kind, 0) for kind in {**to, **left}}

    return replace(span, segment=number, entry=add(span.entry), peak=add(span.peak), exit=add(span.exit))


class _Run:
    """One forward and backward pass, cut into passages at the borders of the segments."""

    def __init__(self, module: Trainable, *, buffers: bool, away: bool):
        self._module = module
        self._away = away
        self._buffers = buffers
        self._storages = Storages()
        self._unit_of = {p.name: p.unit for p in model_shape(module).parameters}
        self._owned: dict[int, list[nn.Parameter]] = {}
        if isinstance(module, PlainLoop):
            self._storages.vocabulary = module.last.out_features
        weights = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)
        self._storages.shared = next((p.shape for p in module.parameters() if weights[id(p)] > 1), None)

    def passages(self, batch: Mapping[str, Tensor]) -> list[Passage]:
        module, storages = self._module, self._storages
        module.train()
        if module.tail is not None:
            chunks = list(_ends(module.tail, batch["targets"]))
            module.tail.chunks = lambda tokens: self._chosen(chunks)  # type: ignore[method-assign]
        hooks = [hook for index, unit in self._segments() for hook in self._watch(index, unit)]
        hooks += self._take_gradients()
        module.set_shelves(_Shelves(storages) if self._away else None)
        try:
            with storages:
                self._enter("forward", ROOT)
                loss = module(batch, 1.0)
                self._enter("backward", self._tail if module.last is not None else len(module.blocks))
                loss.backward()
                del loss
                self._close()
                if isinstance(module, PlainLoop):
                    module.output = None
        finally:
            for hook in hooks:
                hook.remove()
            module.set_shelves(None)
            if module.tail is not None:
                del module.tail.chunks
                module.tail.weight_gradient = None
        return storages.passages

    def _chosen(self, chunks: list[tuple[slice, int]]) -> Iterator[slice]:
        """The head's chunks; what stands for several counts as their work."""
        for rows, times in chunks:
            self._storages.times = times
            yield rows
        self._storages.times = 1

    @property
    def _tail(self) -> int:
        return len(self._module.blocks) + 1

    def _segments(self) -> Iterator[tuple[int, nn.Module]]:
        yield from enumerate(self._module.blocks, start=1)
        if self._module.last is not None:
            yield self._tail, self._module.last

    def _watch(self, index: int, unit: nn.Module) -> Iterator[Any]:
        """The forward pass enters with the unit's call, the backward pass of what is before it with its input."""

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._storages.passages[-1].phase == "backward":
                return  # recompute
            self._enter("forward", index)
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _gradient: self._enter("backward", index - 1))
                    break

        yield unit.register_forward_pre_hook(enter, with_kwargs=True)

    def _take_gradients(self) -> list[Any]:
        module, hooks = self._module, []
        for name, parameter in module.named_trainables():
            unit = self._unit_of[name]
            segment = unit if unit <= self._tail else ROOT
            self._owned.setdefault(segment, []).append(parameter)
            parameter.grad_dtype = torch.float32 if self._buffers else parameter.dtype
            parameter.grad = torch.empty_like(parameter, dtype=torch.float32) if self._buffers else None
            hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
        if self._buffers and module.tail is not None:
            module.tail.weight_gradient = module.tail.head.weight.grad
        return hooks

    def _arrived(self, parameter: Tensor) -> None:
        if not self._buffers and parameter.grad is not None:
            self._storages.rename(parameter.grad, "gradients")

    def _enter(self, phase: Literal["forward", "backward"], segment: int) -> None:
        if self._storages.passages:
            self._close()
        kind: Kind = "temporaries" if phase == "backward" else "activations"
        if phase == "forward" and self._module.last is not None and segment == self._tail:
            kind = "head"
        self._storages.begin(phase, segment, kind)

    def _close(self) -> None:
        """End the passage; then its unit's gradients go."""
        self._storages.end()
        ended = self._storages.passages[-1]
        if ended.phase == "backward" and not self._buffers:
            for parameter in self._owned.get(ended.segment, ()):
                parameter.grad = None


class _Shelves:
    """Stand-ins for memory elsewhere."""

    def __init__(self, storages: Storages):
        self._storages = storages

    def begin(self) -> "_Shelf":
        return _Shelf(self._storages)


class _Shelf:
    def __init__(self, storages: Storages):
        self._storages = storages
        self._data: list[Tensor] = []

    def put(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        self._data.append(self._storages.put_away(storage.nbytes()))
        return len(self._data) - 1

    def end(self) -> None:
        pass

    def get(self, number: int) -> Tensor:
        return self._data[number]


def _ends(tail: HeadLoss, targets: Tensor) -> list[tuple[slice, int]]:
    """Chunks of one size take the same memory, one after another: the first, a later and a last, shorter one.

    Each with the number of chunks that it stands for.
    """
    chunks = list(HeadLoss.chunks(tail, targets.numel()))
    if len(chunks) <= 3:
        return [(rows, 1) for rows in chunks]
    return [(chunks[0], 1), (chunks[1], len(chunks) - 2), (chunks[-1], 1)]
