"""Which weights of a layer go, and what the others become.

Scores are those of the papers: magnitude; Wanda's magnitude times the norm of what the input is (arXiv 2306.11695);
SparseGPT's share of the loss that the other weights can't make up for (arXiv 2301.00774).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from shardlab.compress.second_order import compensated
from shardlab.errors import UserError


@dataclass(frozen=True)
class Amount:
    """How much goes: a `share` of all weights, or all but `kept` in each `of` inputs that follow each other."""

    share: float | None = None
    kept: int = 0
    of: int = 0

    @property
    def name(self) -> str:
        """As it is written in a command."""
        return f"{self.share:g}" if self.share is not None else f"{self.kept}:{self.of}"


def parse_amount(sparsity: float | None, pattern: str | None) -> Amount:
    """`--sparsity` or `--pattern`, of which there must be one. Raises UserError."""
    if (sparsity is None) == (pattern is None):
        raise UserError("give either --sparsity, such as 0.5, or --pattern, such as 2:4")
    if sparsity is not None:
        if not 0 < sparsity < 1:
            raise UserError(f"--sparsity {sparsity:g}: give a share between 0 and 1")
        return Amount(sparsity)
    found = re.fullmatch(r"(\d+):(\d+)", pattern or "")
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise UserError(f"--pattern {pattern}: write N:M, such as 2:4: N weights are kept in each M")
    return Amount(kept=int(found[1]), of=int(found[2]))


def by_magnitude(weight: Tensor, amount: Amount) -> Tensor:
    """Which weights (outputs, inputs) stay: the largest of the layer, or of each M."""
    return _largest(weight.abs(), amount, whole=True)


def by_wanda(weight: Tensor, amount: Amount, moment: Tensor) -> Tensor:
    """Which weights stay: in each output row those that add the most to the output, one by one."""
    return _largest(weight.abs() * moment.diagonal().sqrt(), amount, whole=False)


def by_sparsegpt(weight: Tensor, amount: Amount, moment: Tensor) -> tuple[Tensor, Tensor]:
    """(which weights stay, the weights after the others have made up for those that went)."""
    stays = torch.ones_like(weight, dtype=torch.bool)

    def change(part: Tensor, places: slice, roots: Tensor) -> Callable[[Tensor, int], Tensor]:
        inside = stays[:, places]
        if amount.share is not None:
            inside.copy_(_largest((part / roots).abs(), amount, whole=True))

        def column(values: Tensor, place: int) -> Tensor:
            if amount.of and place % amount.of == 0:  # by what the weights of this group have become
                group = slice(place, place + amount.of)
                inside[:, group] = _largest((part[:, group] / roots[group]).abs(), amount, whole=False)
            return values * inside[:, place]

        return column

    return stays, compensated(weight, moment, change)


def masks_by_magnitude(
    module: nn.Module, sparsity: float, *, scope: Literal["layer", "global"] = "layer", ignore: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Which weights of any module's linear layers and convolutions stay, by name: what `Engine.prepare` takes.

    A share `sparsity` goes of each layer, or (`scope` global) of all together. `ignore`: patterns of layers' names.
    Nothing is changed here. Raises UserError where no layer is left.
    """
    weights = {
        f"{name}.weight" if name else "weight": layer.weight.detach()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if not any(fnmatchcase(name, pattern) for pattern in ignore)
    }
    if not weights:
        raise UserError("no linear layer and no convolution is left to prune")
    amount = parse_amount(sparsity, None)
    if scope == "global":
        cutoff = Cutoff.find(weights.values, sparsity)
        return {name: cutoff.stays(weight) for name, weight in weights.items()}
    return {n: by_magnitude(weight.flatten(1), amount).reshape(weight.shape) for n, weight in weights.items()}


class Cutoff:
    """The magnitude below which weights of several tensors go, so that a share of all of them does.

    Found exactly by counting bits (a float's order without its sign is that of its bits), with one tensor in memory.
    """

    def __init__(self, bits: int, equal: int):
        self._bits, self._equal = bits, equal

    @classmethod
    def find(cls, tensors: Callable[[], Iterable[Tensor]], share: float) -> "Cutoff":
        """`tensors` (fp32) is called twice: for the upper half of the bits, and for the lower one."""
        upper = sum(torch.bincount(_magnitude(one) >> 16, minlength=1 << 15) for one in tensors())
        assert isinstance(upper, Tensor)
        left = round(int(upper.sum()) * share)
        high, left = _place(upper, left)
        lower = sum(
            torch.bincount(bits[bits >> 16 == high] & 0xFFFF, minlength=1 << 16) for bits in map(_magnitude, tensors())
        )
        assert isinstance(lower, Tensor)
        low, equal = _place(lower, left)
        return cls(high << 16 | low, equal)

    def stays(self, weight: Tensor) -> Tensor:
        """Which weights stay. Of those that are equal to the cutoff the first go, over all calls, as far as needed."""
        bits = _magnitude(weight)
        stays = bits > self._bits
        equal = (bits == self._bits).nonzero().flatten()
        gone = min(self._equal, len(equal))
        stays[equal[gone:]] = True
        self._equal -= gone
        return stays.reshape(weight.shape)


def _magnitude(tensor: Tensor) -> Tensor:
    """(elements,) integers in the order of the absolute values."""
    return tensor.detach().abs().float().contiguous().view(torch.int32).flatten()


def _place(counts: Tensor, number: int) -> tuple[int, int]:
    """(the place in which the `number`-th smallest lies, how many of that place are among the smallest)."""
    before = counts.cumsum(0)
    place = int(torch.searchsorted(before, max(number, 1)))
    return place, number - (int(before[place - 1]) if place else 0)


def without_inputs(weight: Tensor, moment: Tensor, keep: Tensor, damping: float = 0.01) -> Tensor:
    """`weight` (outputs, inputs) for the inputs `keep` alone, set so that the outputs change the least.

    By least squares over what the layer is given: what the other inputs gave is made up for by
    W[:, gone] H[gone, keep] H[keep, keep]^-1. `damping`, of H's mean diagonal, holds that back where rows are few.
    """
    gone = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    gone[keep] = False
    inner = moment[keep][:, keep].clone()
    inner.diagonal().add_(damping * moment.diagonal().mean())
    missing = weight[:, gone] @ moment[gone][:, keep]
    return weight[:, keep] + torch.linalg.solve(inner, missing.T).T


def _largest(score: Tensor, amount: Amount, *, whole: bool) -> Tensor:
    """Where `score` is among the largest: of each M inputs, or, of a share, of the `whole` or of each row."""
    if amount.share is None:
        groups = score.reshape(score.shape[0], -1, amount.of)
        chosen = groups.topk(amount.kept, dim=-1).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, chosen, True).reshape(score.shape)
    rows = score.reshape(1, -1) if whole else score
    gone = rows.topk(round(rows.shape[1] * amount.share), dim=1, largest=False).indices
    return torch.ones_like(rows, dtype=torch.bool).scatter_(1, gone, False).reshape(score.shape)
