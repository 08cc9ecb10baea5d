"""Hidden states of a student's blocks, drawn towards those of a teacher's: each pair through a projection of its own.

The projections are parameters of the module that a backend trains: they are sharded, updated and saved in checkpoints
as all others are. Their names begin with `PREFIX`, by which the model that is written at the end leaves them out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.model.deferred import Weights, build_deferred
from shardlab.recipe import HiddenSection

PREFIX = "distill.projections."  # of the projections' names in a checkpoint

Pair = tuple[int, int]  # a block of the student and one of the teacher, from 0


class Matching(nn.Module):
    """How far apart the states of each of `pairs` are; `projections` is empty where widths are equal."""

    def __init__(self, pairs: Sequence[Pair], widths: Pair, section: HiddenSection, *, projected: bool):
        """`widths`: the student's hidden size and the teacher's."""
        super().__init__()
        self.pairs = tuple(pairs)
        self.loss = section.loss
        self.weight = section.weight
        student, teacher = widths
        count = len(self.pairs) if projected else 0
        self.projections = nn.ModuleList(nn.Linear(student, teacher, bias=False) for _ in range(count))

    def forward(self, student: Mapping[int, Tensor], teacher: Mapping[int, Tensor], targets: Tensor) -> Tensor:
        """The weighted distance, averaged over the pairs and summed over the tokens that count: a scalar in fp32.

        States by number of the block, (batch, sequence, width); `targets` (batch, sequence).
        """
        valid, total = targets != IGNORED, torch.zeros((), dtype=torch.float32, device=targets.device)
        for number, (mine, other) in enumerate(self.pairs):
            state = self.projections[number](student[mine]) if self.projections else student[mine]
            total = total + self._distance(state.float(), teacher[other].float()).where(valid, 0).sum()
        return self.weight / len(self.pairs) * total

    def _distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Of each token, over the last dim."""
        if self.loss == "cosine":
            return 1 - nn.functional.cosine_similarity(one, other, dim=-1)
        return (one - other).square().mean(-1)

    def describe(self) -> str:
        """For people, who count blocks from 1."""
        pairs = ", ".join(f"{mine + 1}<-{other + 1}" for mine, other in self.pairs)
        how = " through projections" if self.projections else ""
        return f"+ {self.weight:g} x {self.loss} of hidden states{how}, blocks {pairs}"


def matching(section: HiddenSection, blocks: Pair, widths: Pair) -> tuple[Matching, Weights]:
    """What `section` asks for, and its projections' initial values.

    `blocks` and `widths`: the student's number of blocks and hidden size, and the teacher's.
    Raises UserError for a block that is not there, and for widths that differ without a projection.
    """
    ours, theirs = blocks
    if section.layers is None:
        pairs = [(number - 1, -(-number * theirs // ours) - 1) for number in range(1, ours + 1)]
    else:
        pairs = [(mine - 1, other - 1) for mine, other in section.layers]
    for whose, count, asked in (("student", ours, {a for a, _ in pairs}), ("teacher", theirs, {b for _, b in pairs})):
        if max(asked) >= count:
            raise UserError(f"distill.hidden.layers: the {whose} has {count} blocks, and no block {max(asked) + 1}")
    if section.projection is False and widths[0] != widths[1]:
        raise UserError(
            f"distill.hidden: the student's hidden states have {widths[0]} numbers, the teacher's {widths[1]}: "
            "they need projections, so set distill.hidden.projection=null"
        )
    projected = section.projection or widths[0] != widths[1]
    made, weights = build_deferred(lambda: Matching(pairs, widths, section, projected=projected), seed=0)
    assert isinstance(made, Matching)
    return made, weights


@contextmanager
def outputs(blocks: Sequence[nn.Module], numbers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """By number, what those of `blocks` return that are run inside: the hidden state, as the next block is given it.

    Put on for one pass, behind the hooks that shard a block, which may exchange what it returns. A block that is run
    again for its backward pass is not called, its forward is.
    """
    found: dict[int, Tensor] = {}

    def note(number: int) -> Any:
        def keep(_block: nn.Module, _given: Any, output: Any) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        return keep

    hooks = [blocks[number].register_forward_hook(note(number)) for number in set(numbers)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class WithProjections:
    """A student's initial values, and its projections'."""

    def __init__(self, weights: Weights, projections: Weights):
        self._weights = weights
        self._projections = projections

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        if name.startswith(PREFIX):
            return self._projections.tensor(f"projections.{name.removeprefix(PREFIX)}")
        return self._weights.tensor(name)
