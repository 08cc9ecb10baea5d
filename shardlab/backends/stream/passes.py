"""One window's way through the segments: every micro-batch through a segment before the next segment comes.

Forward without a graph, keeping each block's input; then the head's loss with its gradient; then backward, each block
run once more from its input and differentiated. Every segment so crosses the disk once for each pass, however many
micro-batches there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from shardlab.backends.base import local_norms, sum_dtype
from shardlab.backends.stream.binding import Binding, gradients
from shardlab.backends.stream.boundaries import Boundaries
from shardlab.backends.stream.layout import Layout, Segment
from shardlab.backends.stream.pipeline import Pipeline
from shardlab.backends.stream.spill import Spill
from shardlab.backends.stream.taught import RowwiseTargets
from shardlab.backends.stream.vocabulary import RowwiseLoss, UsedRows, embed
from shardlab.errors import UserError
from shardlab.model.cached_teacher import CachedTargets
from shardlab.model.segments import Capture
from shardlab.model.teacher import Distillation
from shardlab.model.trainable import CausalLM

Visits = Iterator[tuple[Segment, Tensor]]
Batches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Machinery:
    """What every pass works with."""

    module: CausalLM
    layout: Layout
    pipeline: Pipeline
    binding: Binding
    boundaries: Boundaries
    device: torch.device
    dtype: torch.dtype
    spill: Spill | None = None


@dataclass
class Pass:
    """A forward pass over `batches`, whose random numbers are those of the micro-batches `numbers`; see `train`.

    `loss` is the sum of the token losses over `denominator`. After `train`, `norms` holds each trained tensor's (range
    of a tensor's) gradient norm by name; it is empty where the loss was not finite, and no gradient was then made.
    """

    on: Machinery
    batches: Batches
    numbers: Sequence[int]
    denominator: float
    loss: Tensor = field(init=False)
    norms: dict[str, list[Tensor]] = field(default_factory=dict)

    def evaluate(self) -> Tensor:
        """The loss alone."""
        layout = self.on.layout
        order = [*layout.table, layout.root, *layout.blocks, layout.tail, *layout.head]
        with closing(self.on.pipeline.visits(order)) as visits, torch.no_grad():  # type: ignore[type-var]
            hidden = self._forward(visits, keep=False)
            self._head(visits, hidden, train=False)
        return self.loss

    def train(self) -> Tensor:
        """The loss, with every gradient in its file."""
        layout, lowest = self.on.layout, self._lowest()
        head = [layout.tail, *layout.head]
        if len(layout.head) > 1:
            head += reversed(layout.head)  # the second pass over its rows begins with those that are still there
        order = [*layout.table, layout.root, *layout.blocks, *head, *reversed(layout.blocks[lowest:])]
        order += [layout.root] if self._embedding_trained() else []
        with closing(self.on.pipeline.visits(order)) as visits:  # type: ignore[type-var]
            with torch.no_grad():
                hidden = self._forward(visits, keep=True, lowest=lowest)
            if self.on.spill is not None:
                self.on.spill.turn()
            gradient = self._head(visits, hidden, train=True)
            del hidden
            if gradient is not None:
                self._backward(visits, gradient, lowest)
                if self._embedding_trained():
                    self._backward_embedding(visits, gradient)
        self.on.boundaries.clear()
        if self.on.spill is not None:
            self.on.spill.clear()
        self.on.pipeline.finish_gradients()
        return self.loss

    def _embedding_trained(self) -> bool:
        return any(self.on.layout.segments[index].trained for index in (*self.on.layout.table, self.on.layout.root))

    def _lowest(self) -> int:
        """The first block that gradients have to go through."""
        if self._embedding_trained():
            return 0
        blocks = self.on.layout.blocks
        return next((n for n, index in enumerate(blocks) if self.on.layout.segments[index].trained), len(blocks))

    def _further(self, number: int, lowest: int) -> bool:
        """Whether block `number`'s input has a gradient."""
        return number > lowest or self._embedding_trained()

    def _enter(self, number: int) -> None:
        self.on.module.random.micro_batch = self.numbers[number]

    def _spilled(self, number: int) -> bool:
        """Whether block `number` is not run again."""
        return self.on.spill is not None and number >= self.on.spill.first

    def _forward(self, visits: Visits, *, keep: bool, lowest: int = 0) -> list[Tensor]:
        """Each micro-batch's last hidden state.

        With `keep` the blocks' inputs stay in `boundaries`, or what they save goes to the file where gradients come
        by, which is from block `lowest` on.
        """
        on = self.on
        table = on.module.table
        assert isinstance(table, nn.Embedding)
        self._used = UsedRows(self.batches, table.weight.shape[1], on.dtype)
        for _ in on.layout.table:
            segment, weights = next(visits)
            self._used.take(segment.rows(), _as_rows(segment, weights))
        root, weights = next(visits)
        captures = self._embed(root, weights, table)
        hidden = [capture.hidden for capture in captures]
        self._captures = [replace(capture, hidden=capture.hidden.new_empty(0)) for capture in captures]
        del captures
        for number, block in enumerate(on.module.blocks):
            segment, weights = next(visits)
            spill = on.spill if keep and self._spilled(number) and number >= lowest else None
            if keep and not self._spilled(number):
                on.boundaries.put(number, hidden)
            further = self._further(number, lowest)
            with on.binding.bound(segment, weights):
                for i, capture in enumerate(self._captures):
                    self._enter(i)
                    if spill is None:
                        hidden[i] = capture.run_block(number, block, hidden[i])
                    else:
                        hidden[i] = spill.forward(number, block, capture, hidden[i], further=further)
        return hidden

    def _embed(
        self, root: Segment, weights: Tensor, table: nn.Embedding, gradient: Tensor | None = None
    ) -> list[Capture]:
        captures = []
        with self.on.binding.bound(root, weights, gradient), self._used.in_place_of(table, trained=False):
            for i, (batch, tokens) in enumerate(zip(self.batches, self._used.tokens(), strict=True)):
                self._enter(i)
                captures.append(embed(self.on.module, batch, tokens))
        return captures

    def _head(self, visits: Visits, hidden: list[Tensor], *, train: bool) -> list[Tensor] | None:
        """Set `loss`; in training return each micro-batch's gradient of `hidden`, None where the loss is not finite."""
        on = self.on
        self._tail, weights = next(visits)
        weights = weights.clone()  # it is small, and needed beside the head's rows
        gradient = weights.new_zeros(self._tail.trained, dtype=torch.float32)
        with on.binding.bound(self._tail, weights, gradient if train else None):
            if len(on.layout.head) == 1:
                result = self._whole_head(visits, hidden, train=train)
            else:
                result = self._head_by_rows(visits, hidden, train=train)
        if result is not None and self._tail.trained:
            self._done(self._tail, gradient)
        return result

    def _whole_head(self, visits: Visits, hidden: list[Tensor], *, train: bool) -> list[Tensor] | None:
        on = self.on
        tail = on.module.tail
        segment, weights = next(visits)
        gradient = on.pipeline.gradient(segment) if train and segment.trained else None
        self.loss = torch.zeros((), dtype=sum_dtype(on.device), device=on.device)
        results: list[Tensor] = []
        tail.weight_gradient = None if gradient is None else _as_rows(segment, gradient)
        with on.binding.bound(segment, weights), torch.set_grad_enabled(train):
            for i, batch in enumerate(self.batches):
                self._enter(i)
                on.module.random.enter(len(on.module.blocks) + 1)
                value = hidden[i].detach().requires_grad_(train)
                objective = tail(value, batch["targets"], self.denominator, self._soft(batch, train=train))
                self.loss += objective.detach()
                if train:
                    objective.backward()
                    assert value.grad is not None
                    results.append(value.grad)
        tail.weight_gradient = None
        if not train:
            return None
        if not torch.isfinite(self.loss):
            if gradient is not None:
                on.pipeline.release(gradient)
            return None
        if gradient is not None:
            self._done(segment, gradient, last=not on.layout.tied)
        return results

    def _head_by_rows(self, visits: Visits, hidden: list[Tensor], *, train: bool) -> list[Tensor] | None:
        on = self.on
        tail = on.module.tail
        with torch.no_grad():
            normed = torch.cat([_normed(tail.norms, one).flatten(0, 1) for one in hidden])
            targets = torch.cat([batch["targets"].flatten() for batch in self.batches])
            loss = RowwiseLoss(tail, normed, targets, self._rowwise_soft(normed, train=train))
            for _ in on.layout.head:
                segment, weights = next(visits)
                loss.see(segment.rows(), _as_rows(segment, weights))
            self.loss = loss.total() / self.denominator
            if not train or not torch.isfinite(self.loss):
                return None
            bias = tail.head.bias.grad if tail.head.bias is not None else None
            for _ in on.layout.head:
                segment, weights = next(visits)
                rows, gradient = segment.rows(), None
                if segment.trained:
                    gradient = on.pipeline.gradient(segment)
                loss.differentiate(
                    rows,
                    _as_rows(segment, weights),
                    self.denominator,
                    _as_rows(segment, gradient) if gradient is not None else None,
                    bias[rows] if bias is not None else None,
                )
                if gradient is not None:
                    self._done(segment, gradient, last=not on.layout.tied)
        assert loss.gradient is not None
        parts = loss.gradient.split([one.shape[:-1].numel() for one in hidden])
        return [self._through_norms(one, part.view(one.shape)) for one, part in zip(hidden, parts, strict=True)]

    def _soft(self, batch: Mapping[str, Tensor], *, train: bool) -> CachedTargets | None:
        """What a teacher's cache says of a micro-batch; evaluations are of the text alone."""
        taught = self.on.module.distillation
        assert not isinstance(taught, Distillation)
        return taught.look(batch) if train and taught is not None else None

    def _rowwise_soft(self, normed: Tensor, *, train: bool) -> RowwiseTargets | None:
        parts = [soft for batch in self.batches if (soft := self._soft(batch, train=train)) is not None]
        return RowwiseTargets(parts, normed.device) if parts else None

    def _through_norms(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            value = hidden.detach().requires_grad_()
            normed = _normed(self.on.module.tail.norms, value)
            normed.backward(gradient.to(normed.dtype))
        assert value.grad is not None
        return value.grad

    def _backward(self, visits: Visits, gradient: list[Tensor], lowest: int) -> None:
        """Through the blocks; `gradient` becomes that of the lowest block's input."""
        on, blocks = self.on, self.on.module.blocks
        for number in reversed(range(lowest, len(blocks))):
            segment, weights = next(visits)
            spilled = self._spilled(number)
            inputs = [] if spilled else on.boundaries.take(number, ahead=number > lowest)
            flat = on.pipeline.gradient(segment) if segment.trained else None
            further = self._further(number, lowest)
            with on.binding.bound(segment, weights, flat), torch.enable_grad():
                if spilled:
                    assert on.spill is not None
                    for i, found in enumerate(on.spill.backward(number, list(gradient))):
                        gradient[i] = found if found is not None else gradient[i]
                for i, capture in enumerate(self._captures if not spilled else ()):
                    self._enter(i)
                    value = inputs[i].detach().requires_grad_(further)
                    output = capture.run_block(number, blocks[number], value)
                    output.backward(gradient[i])
                    inputs[i] = gradient[i] = value.grad if value.grad is not None else gradient[i]
                    del output, value
            if flat is not None:
                self._done(segment, flat)

    def _backward_embedding(self, visits: Visits, gradient: list[Tensor]) -> None:
        on = self.on
        table = on.module.table
        assert isinstance(table, nn.Embedding)
        trained = any(on.layout.segments[index].trained for index in on.layout.table)
        root, weights = next(visits)
        flat = weights.new_zeros(root.trained, dtype=torch.float32)
        with (
            on.binding.bound(root, weights, flat),
            self._used.in_place_of(table, trained) as rows,
            torch.enable_grad(),
        ):
            for i, (batch, tokens) in enumerate(zip(self.batches, self._used.tokens(), strict=True)):
                self._enter(i)
                capture = embed(on.module, batch, tokens)
                if i == 0:
                    _refuse_other_ways(on.module, capture)
                capture.hidden.backward(gradient[i])
        if root.trained:
            self._done(root, flat)
        if not trained:
            return
        assert rows.grad is not None
        for index in on.layout.table:
            segment = on.layout.segments[index]
            total = on.pipeline.gradient(segment, stored=on.layout.tied)
            self._used.give(segment.rows(), _as_rows(segment, total), rows.grad)
            self._done(segment, total)

    def _done(self, segment: Segment, flat: Tensor, *, last: bool = True) -> None:
        """The segment's gradient goes to its file; with `last` it is whole, and its norms are taken."""
        if last:
            named = gradients(segment, flat)
            for name, norm in zip(named, local_norms(list(named.values())), strict=True):
                self.norms.setdefault(name, []).append(norm)
        self.on.pipeline.put_gradient(segment, flat)


def _as_rows(segment: Segment, flat: Tensor) -> Tensor:
    """A segment of a table or head as (rows, width)."""
    (part,) = segment.parts
    return flat[: part.numel].view(-1, part.shape[1])


def _normed(norms: nn.ModuleList, hidden: Tensor) -> Tensor:
    for norm in norms:
        hidden = norm(hidden)
    return hidden


def _refuse_other_ways(module: CausalLM, capture: Capture) -> None:
    """Raises UserError where a block gets something trained beside the hidden state: its gradient would be lost."""
    for call in capture.calls:
        for value in (*call.args, *call.kwargs.values()):
            values = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(one, Tensor) and one.requires_grad for one in values):
                raise UserError(
                    f"backend stream can't train {module.architecture}: its blocks take trained values beside the "
                    "hidden state; set shard.backend to another"
                )
