"""What a change costs: a model's logits beside those it had, for the same tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Quality:
    """What a change costs, over the same held-out tokens before and after."""

    tokens: int
    loss_before: float
    loss_after: float
    divergence: float  # mean Kullback-Leibler divergence of the changed model from the first, in nats for a token
    agreement: float  # share of tokens whose likeliest successor is the same

    @property
    def perplexity_before(self) -> float:
        """Of the model as it was."""
        return math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """Of the changed model."""
        return math.exp(self.loss_after)


class Comparison:
    """Sums up two models' logits for the same tokens."""

    def __init__(self) -> None:
        self._totals = torch.zeros(4, dtype=torch.float64)
        self._tokens = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Logits (tokens, vocabulary) of both, and the next tokens (tokens,), all of which count."""
        first, second = before.log_softmax(-1), after.log_softmax(-1)
        losses = [nn.functional.nll_loss(one, targets, reduction="sum") for one in (first, second)]
        divergence = nn.functional.kl_div(second, first, reduction="sum", log_target=True)
        agreed = (first.argmax(-1) == second.argmax(-1)).sum()
        self._totals += torch.stack([*losses, divergence, agreed]).double().cpu()
        self._tokens += len(targets)

    def quality(self) -> Quality:
        """Of all that was added."""
        return Quality(self._tokens, *(self._totals / max(self._tokens, 1)).tolist())
