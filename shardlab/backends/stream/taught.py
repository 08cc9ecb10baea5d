"""A cached teacher's divergence where the head's rows come a range at a time (see `model/cached_teacher`)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardlab.model.cached_teacher import NOTHING, CachedTargets, log_shares


class RowwiseTargets:
    """Of all micro-batches, one after another: `see` each range of rows, then `values`, then `differentiate` each."""

    def __init__(self, parts: Sequence[CachedTargets], device: torch.device):
        first = parts[0]
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "shares", "rest"))
        self._said = CachedTargets(first.source, *joined)
        self.weight = first.weight
        tokens, kept = self._said.ids.shape
        self._top = torch.zeros(tokens, kept, dtype=torch.float32, device=device)
        self._rest = torch.full((tokens, 1), NOTHING, dtype=torch.float32, device=device)

    def see(self, part: slice, rows: slice, scores: Tensor) -> None:
        """Take the scores (tokens of `part`, `rows`) in, which stay as they are."""
        scaled = self._scaled(rows, scores)
        if scaled is None:
            return
        inside, places = self._inside(part, rows, scaled)
        self._top[part] += scaled.gather(1, places) * inside
        scaled = _without(scaled, inside, places)
        self._rest[part] = torch.logaddexp(self._rest[part], scaled.logsumexp(1, keepdim=True))

    def values(self, chunks: Iterable[slice]) -> Tensor:
        """The divergence of each token, (tokens,), when all rows were seen; `chunks` of tokens are looked at by turns.

        From here on gradients with respect to the k + 1 outcomes' scores lie where the student's scores were.
        """
        found = torch.empty_like(self._rest).squeeze(1)
        self._of_rest = torch.empty_like(self._rest)
        for part in chunks:
            shares = log_shares(self._top[part], self._rest[part])
            measured = self._said.source.measure.of_logs(self._said.logs(part), shares, differentiate=True)
            found[part], gradient = measured
            assert gradient is not None
            self._top[part], self._of_rest[part] = gradient[:, :-1], gradient[:, -1:]
        return found

    def differentiate(self, part: slice, rows: slice, scores: Tensor) -> Tensor | None:
        """Each token's gradient with respect to `scores`, which stay as they are; it may end at an earlier column."""
        scaled = self._scaled(rows, scores)
        if scaled is None:
            return None
        inside, places = self._inside(part, rows, scaled)
        spread = _without(scaled, inside, places).sub_(self._rest[part]).exp_().mul_(self._of_rest[part])
        return spread.scatter_add_(1, places, self._top[part] * inside)

    def _scaled(self, rows: slice, scores: Tensor) -> Tensor | None:
        """Softened scores of what is compared of `rows`; None where nothing is."""
        compared = self._said.source.columns - rows.start
        return scores[:, :compared] / self._said.source.measure.temperature if compared > 0 else None

    def _inside(self, part: slice, rows: slice, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the tokens' ids are among `rows`, and where (0 for the others)."""
        ids = self._said.indices(part)
        inside = (ids >= rows.start) & (ids < rows.start + scaled.shape[1])
        return inside, (ids - rows.start).where(inside, 0)


def _without(scaled: Tensor, inside: Tensor, places: Tensor) -> Tensor:
    """`scaled`, in place, with -infinity at each token's ids; those that are elsewhere change nothing."""
    least = torch.where(inside, -torch.inf, torch.inf)
    return scaled.scatter_reduce_(1, places, least, "amin")
