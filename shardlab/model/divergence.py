"""How far a student's next-token distributions are from a teacher's, and which way its scores should move.

Both are softened by a temperature T, and a divergence counts T² times: its gradient falls with 1/T² as T grows (Hinton,
Vinyals and Dean, 2015), so T does not change its weight beside the cross-entropy. p is the teacher's, q the student's:

- forward_kl: KL(p || q)
- reverse_kl: KL(q || p)
- jsd: b KL(p || m) + (1-b) KL(q || m) with m = b p + (1-b) q (the generalized divergence of Agarwal et al., 2024)
- skew_kl: KL(p || m) with m = b p + (1-b) q; skew_reverse_kl: KL(q || m) with m = (1-b) p + b q (Ko et al., 2024)

Gradients are written out, as the head needs them in its forward pass. Of any divergence D they follow from dD/dq: with
q = softmax(s / T), dD/ds = q (dD/dq - sum q dD/dq) / T.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from shardlab.recipe import DivergenceName

DIVERGENCES: tuple[DivergenceName, ...] = get_args(DivergenceName)


@dataclass(frozen=True)
class Divergence:
    """`mixture` is b above, strictly between 0 and 1; the plain divergences don't use it."""

    name: DivergenceName = "forward_kl"
    temperature: float = 1.0
    mixture: float = 0.5

    def __call__(self, student: Tensor, teacher: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """(T² x divergence of each row, (tokens,); its gradient with respect to `student`, if asked for).

        `student` and `teacher` are scores (tokens, vocabulary) of one floating type, which is computed in.
        """
        q, p = (torch.log_softmax(scores / self.temperature, dim=1) for scores in (student, teacher))
        return self.of_logs(p, q, differentiate=differentiate)

    def of_logs(self, p: Tensor, q: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """The same of log shares, softened already, the teacher's first; they are overwritten."""
        value, gradient = _FORMULAS[self.name](p, q, self.mixture, differentiate)
        return value.mul_(self.temperature**2), None if gradient is None else gradient.mul_(self.temperature)


# Each takes log p, log q, b and whether a gradient is wanted, and returns (divergence, T x its gradient).
_Formula = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


def _forward_kl(p: Tensor, q: Tensor, _mixture: float, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    shares = p.exp()
    value = _expected(shares, p - q)
    return value, q.exp_().sub_(shares) if differentiate else None


def _reverse_kl(p: Tensor, q: Tensor, _mixture: float, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    shares, ratio = q.exp(), q - p
    return _expected(shares, ratio), _through_softmax(shares, ratio) if differentiate else None


def _jsd(p: Tensor, q: Tensor, mixture: float, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    middle = _mixed(p, q, mixture)
    shares, ratio = q.exp(), q - middle
    value = mixture * _expected(p.exp(), p - middle) + (1 - mixture) * _expected(shares, ratio)
    return value, _through_softmax(shares, ratio.mul_(1 - mixture)) if differentiate else None


def _skew_kl(p: Tensor, q: Tensor, mixture: float, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    ratio = p - _mixed(p, q, mixture)
    value = _expected(p.exp(), ratio)
    return value, _through_softmax(q.exp(), ratio.exp_().mul_(mixture - 1)) if differentiate else None


def _skew_reverse_kl(p: Tensor, q: Tensor, mixture: float, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    shares, ratio = q.exp(), q - _mixed(q, p, mixture)
    value = _expected(shares, ratio)
    return value, _through_softmax(shares, ratio - mixture * ratio.exp()) if differentiate else None


_FORMULAS: dict[DivergenceName, _Formula] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl,
}


def _mixed(first: Tensor, second: Tensor, share: float) -> Tensor:
    """log(share x exp(first) + (1 - share) x exp(second))."""
    return torch.logaddexp(first + math.log(share), second + math.log1p(-share))


def _expected(shares: Tensor, values: Tensor) -> Tensor:
    return torch.linalg.vecdot(shares, values, dim=1)


def _through_softmax(shares: Tensor, slope: Tensor) -> Tensor:
    """From dD/dq to T x dD/ds; `slope` is overwritten."""
    return slope.sub_(_expected(shares, slope).unsqueeze(1)).mul_(shares)
