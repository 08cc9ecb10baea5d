"""HeadLoss: final norm, head and cross-entropy as one module and one shard unit.

The logits of a step can be its largest tensor (tokens x vocabulary). Here they never exist whole: the loss loops over
chunks of tokens, and since the denominator is known before the first backward pass, the gradient of a chunk is made
while its logits are still there. The backward pass only hands out what the forward pass left.

A student's loss is made in the same chunks: the teacher's scores of a chunk come when they are asked for.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardlab.data.window import IGNORED

CHUNK_TOKENS = 256  # below this the head's matrix product loses speed (see docs/decisions.md)


class SoftTargets(Protocol):
    """What a teacher says of a micro-batch's tokens. `weight` is the divergence's, the cross-entropy has the rest."""

    weight: float

    def divergence(self, rows: slice, scores: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """(divergence of each of `rows`' tokens, (tokens,); its gradient with respect to `scores`, if asked for).

        `scores` are the student's, (tokens, vocabulary) in fp32, and stay as they are. The gradient may end at an
        earlier column: there is none for what comes after. Rows that don't count may hold anything.
        """
        ...


class HeadLoss(nn.Module):
    """Summed cross-entropy of next tokens, divided by a denominator given from outside.

    `norms` are applied to the hidden states in order, then `head` (a linear layer, possibly tied to the embedding),
    then `logits * multiplier`, then `softcap * tanh(logits / softcap)` where the model has one.
    """

    def __init__(
        self,
        norms: list[nn.Module],
        head: nn.Linear,
        *,
        multiplier: float = 1.0,
        softcap: float | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.head = head
        self.multiplier = multiplier
        self.softcap = softcap
        self.chunk_tokens = chunk_tokens
        # A backend that keeps gradients in buffers of its own sets this: the head's gradient is then added straight
        # into it, instead of being made whole and handed to autograd. (vocabulary, hidden), fp32.
        self.weight_gradient: Tensor | None = None

    def forward(self, hidden: Tensor, targets: Tensor, denominator: float, soft: SoftTargets | None = None) -> Tensor:
        """Sum of the valid targets' losses / `denominator`, a scalar in fp32.

        `hidden` is (batch, sequence, hidden size), the last block's output; `targets` (batch, sequence), `IGNORED`
        where not counted. With `soft` a token's loss is the weighted sum of cross-entropy and divergence.
        """
        for norm in self.norms:
            hidden = norm(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        result: Tensor = _ChunkedCrossEntropy.apply(
            flat,
            self.head.weight,
            self.head.bias,
            targets.reshape(-1),
            denominator,
            self,
            torch.is_grad_enabled(),
            soft,
        )
        return result

    def chunks(self, tokens: int) -> Iterable[slice]:
        """The rows of each chunk. What only follows memory puts a shorter list in place of it: all take the same."""
        return (slice(start, min(start + self.chunk_tokens, tokens)) for start in range(0, tokens, self.chunk_tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """The whole logits (batch, sequence, vocabulary), as the model itself would return them."""
        for norm in self.norms:
            hidden = norm(hidden)
        return self.transform(self.head(hidden))

    def transform(self, logits: Tensor) -> Tensor:
        """What the model does to the head's output."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a linear layer in chunks of tokens, with its gradient made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        denominator: float,
        module: HeadLoss,
        differentiate: bool,
        soft: SoftTargets | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradients = _Gradients(hidden, weight, bias, module) if differentiate else None
        for rows in module.chunks(hidden.shape[0]):
            part = hidden[rows]
            logits = torch.nn.functional.linear(part, weight, bias)
            loss, logits_gradient = _chunk_loss(logits, targets[rows], rows, denominator, module, soft, differentiate)
            total += loss
            if gradients is not None and logits_gradient is not None:
                gradients.add(rows, part, logits_gradient.to(hidden.dtype))
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        return total / denominator

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = (
            None if saved is None else saved.mul_(outer[0].to(saved.dtype)) for saved in ctx.saved_tensors
        )
        return hidden, weight, bias, None, None, None, None, None


def _chunk_loss(
    logits: Tensor,
    targets: Tensor,
    rows: slice,
    denominator: float,
    module: HeadLoss,
    soft: SoftTargets | None,
    differentiate: bool,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk and the gradient of (loss / denominator) with respect to the head's output, in fp32.

    `logits` is (tokens, vocabulary), `targets` (tokens,); `rows` are those of the micro-batch's tokens.
    """
    scores = module.transform(logits.float())
    valid = targets != IGNORED
    slope = None if module.softcap is None else 1 - (scores / module.softcap).square()
    taught = None if soft is None else soft.divergence(rows, scores, differentiate=differentiate)
    loss, gradient = _cross_entropy(scores, targets, valid, differentiate)
    if soft is not None and taught is not None:
        loss = (1 - soft.weight) * loss + soft.weight * taught[0].where(valid, 0).sum()
    if gradient is None:
        return loss, None
    if soft is not None and taught is not None and taught[1] is not None:
        columns = gradient[:, : taught[1].shape[1]]
        gradient.mul_(1 - soft.weight)
        columns.add_(taught[1].masked_fill_(~valid.unsqueeze(1), 0), alpha=soft.weight)
    gradient.mul_((valid / denominator * module.multiplier).unsqueeze(1))
    return loss, gradient if slope is None else gradient.mul_(slope)


def _cross_entropy(scores: Tensor, targets: Tensor, valid: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """(sum over the valid targets, its gradient with respect to `scores` whether valid or not).

    The gradient overwrites `scores`: they are ours (a cast or a fresh tensor), or fp32 logits that the caller has no
    more use for.
    """
    picked = targets.where(valid, 0).unsqueeze(1)
    normalizer = torch.logsumexp(scores, dim=1, keepdim=True)
    loss = ((normalizer - scores.gather(1, picked)).squeeze(1) * valid).sum()
    if not differentiate:
        return loss, None
    gradient = scores.sub_(normalizer).exp_()
    return loss, gradient.scatter_add_(1, picked, gradient.new_full((gradient.shape[0], 1), -1.0))


class _Gradients:
    """Gradients of one call: of the hidden states whole, of the head added up over the chunks."""

    # Rows of the head's gradient made at a time where the product can't be added in place: bounds the temporary.
    ROWS = 8192

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, module: HeadLoss):
        self._head = weight
        self._target = module.weight_gradient
        self.hidden = torch.empty_like(hidden)
        self.weight = None
        self.bias = None
        if weight.requires_grad and self._target is None:
            # fp32 also under bf16: sums over many chunks keep their small terms.
            self.weight = self._target = torch.zeros_like(weight, dtype=torch.float32)
        elif not weight.requires_grad:
            self._target = None
        if bias is not None and bias.requires_grad:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, part: Tensor, logits_gradient: Tensor) -> None:
        """Take one chunk's gradient: `part` (tokens, hidden), `logits_gradient` (tokens, vocabulary)."""
        torch.mm(logits_gradient, self._head, out=self.hidden[rows])
        if self.bias is not None:
            self.bias += logits_gradient.sum(0, dtype=torch.float32)
        if self._target is None:
            return
        if self._target.dtype == part.dtype:
            self._target.addmm_(logits_gradient.t(), part)
            return
        for start in range(0, self._target.shape[0], self.ROWS):
            piece = slice(start, start + self.ROWS)
            self._target[piece] += logits_gradient[:, piece].t() @ part
