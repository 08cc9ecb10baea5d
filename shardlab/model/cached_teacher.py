"""A teacher that has spoken before: its likeliest tokens of each position, and the share of all others as one.

The student's distribution is put together the same way, k tokens and the rest, and the two are compared as
distributions over k + 1 outcomes. That is never more than the whole divergence. Its gradient is that of a teacher
whose other tokens have shares as the student has them: within the rest nothing is learned.

Forward and skew KL weigh each outcome by the teacher's share, of which the rest is little. The others weigh by the
student's too, and what the teacher thinks of a token that the student alone finds likely is not in a cache.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.data.window import TAUGHT_IDS, TAUGHT_REST, TAUGHT_SHARES
from shardlab.model.divergence import Divergence
from shardlab.model.teacher import Distillation

NOTHING = -1e30  # the log share of no tokens: finite, as its product with a share of 0 is no number otherwise


def likeliest(scores: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(ids (tokens, k), log shares of these, log share of all others (tokens,)) of scores (tokens, vocabulary).

    Ids come by falling share. The rest is added up from its own tokens: as 1 - the others it would lose its digits.
    """
    logs = torch.log_softmax(scores / temperature, dim=1)
    shares, ids = logs.topk(top_k, dim=1)
    return ids, shares, logs.scatter_(1, ids, -torch.inf).logsumexp(1)


class CachedTeacher:
    """What `Distillation` is to a teacher in memory; the batches bring what it says."""

    teacher: None = None

    def __init__(self, source: Distillation, top_k: int):
        """`top_k` is what is asked for; a vocabulary may have less."""
        self.top_k = min(top_k, source.columns)
        self.measure: Divergence = source.measure
        self.weight = source.weight
        self.columns = source.columns
        self.whole: Callable[[], AbstractContextManager[object]] = nullcontext

    def look(self, batch: Mapping[str, Tensor]) -> "CachedTargets":
        """The teacher's view of a micro-batch."""
        ids, shares, rest = (batch[name] for name in (TAUGHT_IDS, TAUGHT_SHARES, TAUGHT_REST))
        return CachedTargets(self, ids.flatten(0, 1), shares.flatten(0, 1), rest.flatten())


@dataclass(frozen=True)
class CachedTargets:
    """`SoftTargets` of one micro-batch, as its tensors bring them: (tokens, k), (tokens, k), (tokens,)."""

    source: CachedTeacher
    ids: Tensor
    shares: Tensor
    rest: Tensor

    @property
    def weight(self) -> float:
        """See `SoftTargets`."""
        return self.source.weight

    def divergence(self, rows: slice, scores: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """See `SoftTargets`."""
        measure, ids = self.source.measure, self.indices(rows)
        scaled = scores[:, : self.source.columns] / measure.temperature
        top = scaled.gather(1, ids)
        scaled.scatter_(1, ids, -torch.inf)
        rest = scaled.logsumexp(1, keepdim=True).clamp_min_(NOTHING)
        value, gradient = measure.of_logs(self.logs(rows), log_shares(top, rest), differentiate=differentiate)
        if gradient is None:
            return value, None
        spread = scaled.sub_(rest).exp_().mul_(gradient[:, -1:])  # the rest's, by the student's own shares
        return value, spread.scatter_(1, ids, gradient[:, :-1])

    def indices(self, rows: slice) -> Tensor:
        """The k tokens of each of `rows`, int64."""
        return self.ids[rows].long()

    def logs(self, rows: slice) -> Tensor:
        """The teacher's log shares, (tokens, k + 1) in fp32, the rest last; they add up to 1 again after rounding."""
        shares = self.shares[rows].view(torch.float16).float()
        return torch.log_softmax(torch.cat([shares, self.rest[rows].view(torch.float32).unsqueeze(1)], dim=1), dim=1)


def log_shares(top: Tensor, rest: Tensor) -> Tensor:
    """Log shares (tokens, k + 1) of softened scores (tokens, k), and a log-sum-exp of all others' (tokens, 1)."""
    return torch.log_softmax(torch.cat([top, rest], dim=1), dim=1)
