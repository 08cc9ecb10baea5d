"""Embedding and head where the vocabulary's rows come a range at a time.

The embedding sees only the rows that a window has tokens of. The head's loss takes two passes over the rows: the first
for each token's normalizer (a log-sum-exp that goes on from range to range), the second for the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardlab.backends.stream.taught import RowwiseTargets
from shardlab.data.window import IGNORED
from shardlab.model.head import HeadLoss
from shardlab.model.segments import Capture
from shardlab.model.trainable import CausalLM


class UsedRows:
    """The rows of an embedding that a window's tokens use, and their gradients.

    `ids` are the distinct tokens, in ascending order; `weights` (len(ids), width).
    """

    def __init__(self, batches: Sequence[Mapping[str, Tensor]], width: int, dtype: torch.dtype):
        self.ids, self._places = torch.unique(
            torch.cat([batch["input_ids"].flatten() for batch in batches]), return_inverse=True
        )
        self._shapes = [batch["input_ids"].shape for batch in batches]
        self.weights = torch.empty(len(self.ids), width, dtype=dtype, device=self.ids.device)

    def take(self, rows: slice, weights: Tensor) -> None:
        """Keep what is used of the table's `rows`, whose values are `weights` (rows, width)."""
        inside = self._inside(rows)
        self.weights[inside] = weights[self.ids[inside] - rows.start]

    def give(self, rows: slice, gradient: Tensor, of_used: Tensor) -> None:
        """Add the gradients of the used rows, (len(ids), width), to those of the table's `rows`."""
        inside = self._inside(rows)
        gradient.index_add_(0, self.ids[inside] - rows.start, of_used[inside])

    def _inside(self, rows: slice) -> slice:
        borders = torch.searchsorted(self.ids, torch.tensor([rows.start, rows.stop], device=self.ids.device))
        first, last = borders.tolist()
        return slice(first, last)

    def tokens(self) -> list[Tensor]:
        """Each batch's tokens as places in `weights`."""
        sizes = [shape.numel() for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(self._places.split(sizes), self._shapes, strict=True)]

    @contextmanager
    def in_place_of(self, table: nn.Embedding, trained: bool) -> Iterator[nn.Parameter]:
        """Inside, `table` holds the used rows only; yields them as a parameter whose gradient is fp32."""
        parameter = nn.Parameter(self.weights, requires_grad=trained)
        if trained:
            parameter.grad_dtype = torch.float32
        kept, padding = table._parameters["weight"], table.padding_idx
        table._parameters["weight"] = parameter
        if padding is not None:
            place = (self.ids == padding).nonzero()
            table.padding_idx = int(place[0]) if len(place) else None
        try:
            yield parameter
        finally:
            table._parameters["weight"], table.padding_idx = kept, padding


def embed(module: CausalLM, batch: Mapping[str, Tensor], tokens: Tensor) -> Capture:
    """The blocks' input and arguments for `batch`, whose tokens are `tokens` in the table as it is."""
    module.random.enter(0)
    return module.capture({**batch, "input_ids": tokens})


class RowwiseLoss:
    """The loss of a window over a head whose rows come in ranges: `see` each, then `differentiate` each.

    `hidden` (tokens, width) is what the head is applied to, of all micro-batches one after another; `targets`
    (tokens,). Afterwards `gradient` (tokens, width) is that of the hidden states, fp32.
    """

    def __init__(self, head: HeadLoss, hidden: Tensor, targets: Tensor, soft: RowwiseTargets | None = None):
        """With `soft` a token's loss is as `HeadLoss` has it."""
        self._head = head
        self._soft = soft
        self._hard = 1.0 if soft is None else 1 - soft.weight
        self._hidden = hidden
        self._targets = targets
        self._valid = targets != IGNORED
        tokens = len(targets)
        self._normalizer = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)
        self._target_scores = hidden.new_zeros(tokens, dtype=torch.float32)
        self.gradient: Tensor | None = None

    def see(self, rows: slice, weights: Tensor) -> None:
        """Take the head's `rows`, (rows, width), into the loss."""
        for part in self._head.chunks(len(self._targets)):
            scores = self._scores(part, rows, weights)
            highest = torch.logsumexp(scores, dim=1)
            self._normalizer[part] = torch.logaddexp(self._normalizer[part], highest)
            inside, places = self._targets_inside(part, rows)
            picked = scores.gather(1, places.unsqueeze(1)).squeeze(1)
            self._target_scores[part] += picked * inside
            if self._soft is not None:
                self._soft.see(part, rows, scores)

    def total(self) -> Tensor:
        """The summed loss of the valid targets, when all rows were seen."""
        losses = (self._normalizer - self._target_scores) * self._valid
        if self._soft is not None:
            losses = self._hard * losses + self._soft.weight * self._soft.values(self._head.chunks(len(losses))).where(
                self._valid, 0
            )
        return losses.sum(dtype=torch.float64 if losses.device.type != "mps" else torch.float32)

    def differentiate(
        self, rows: slice, weights: Tensor, denominator: float, weight_gradient: Tensor | None, bias: Tensor | None
    ) -> None:
        """Add what the head's `rows` give to the gradients: of the hidden states, of the rows, of their biases."""
        head = self._head
        if self.gradient is None:
            self.gradient = torch.zeros_like(self._hidden, dtype=torch.float32)
        share = self._valid / denominator * head.multiplier
        for part in head.chunks(len(self._targets)):
            scores = self._scores(part, rows, weights)
            slope = None if head.softcap is None else 1 - (scores / head.softcap).square()
            soft = None if self._soft is None else self._soft.differentiate(part, rows, scores)
            gradient = scores.sub_(self._normalizer[part].unsqueeze(1)).exp_()
            inside, places = self._targets_inside(part, rows)
            gradient.scatter_add_(1, places.unsqueeze(1), -inside.to(gradient.dtype).unsqueeze(1))
            if self._soft is not None:
                gradient.mul_(self._hard)
            if self._soft is not None and soft is not None:
                soft.masked_fill_(~self._valid[part].unsqueeze(1), 0)
                gradient[:, : soft.shape[1]].add_(soft, alpha=self._soft.weight)
            gradient.mul_(share[part].unsqueeze(1))
            if slope is not None:
                gradient.mul_(slope)
            cast = gradient.to(self._hidden.dtype)
            self.gradient[part] += cast @ weights
            if bias is not None:
                bias += cast.sum(0, dtype=torch.float32)
            if weight_gradient is not None:
                if weight_gradient.dtype == cast.dtype:
                    weight_gradient.addmm_(cast.t(), self._hidden[part])
                else:
                    weight_gradient += cast.t() @ self._hidden[part]

    def _scores(self, part: slice, rows: slice, weights: Tensor) -> Tensor:
        """Transformed logits, fp32, of some tokens and rows; a tensor of their own."""
        bias = self._head.head.bias
        logits = nn.functional.linear(self._hidden[part], weights, None if bias is None else bias[rows])
        return self._head.transform(logits.float())

    def _targets_inside(self, part: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Which of the tokens have their target among `rows`, and where (0 for the others)."""
        targets = self._targets[part]
        inside = (targets >= rows.start) & (targets < rows.stop)
        return inside, (targets - rows.start).where(inside, 0)
