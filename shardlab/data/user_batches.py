"""Windows from a user's own loader, whose length may differ from rank to rank.

Before each window the ranks agree, in one all-reduce, on how many micro-batches each has and how many tokens count.
A rank that has fewer runs copies without targets, so that no collective of the model waits for a rank that has stopped;
all stop at the same window.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.errors import UserError

AllReduce = Callable[[Tensor], None]  # sums an int64 tensor over the ranks, in place


def windows_from_batches(
    batches: Iterable[Mapping[str, Tensor]],
    *,
    accumulation: int,
    rank: int = 0,
    world_size: int = 1,
    all_reduce: AllReduce | None = None,
    start_step: int = 0,
) -> Iterator[Window]:
    """Collect up to `accumulation` of this rank's batches into each window, until no rank has any left.

    A batch is what `shifted` takes. `all_reduce` is needed with more than one rank. All ranks must iterate together.
    Raises UserError for a batch without labels or targets.
    """
    if world_size > 1 and all_reduce is None:
        raise ValueError(f"{world_size} ranks need an all_reduce to agree on each window")
    source = iter(batches)
    spare: Mapping[str, Tensor] | None = None
    step = start_step
    while True:
        own = [shifted(batch) for batch in islice(source, accumulation)]
        agreed = torch.zeros(world_size + 1, dtype=torch.int64)  # micro-batches of each rank, then tokens
        agreed[rank] = len(own)
        agreed[-1] = sum(int((tensors["targets"] != IGNORED).sum()) for tensors in own)
        if all_reduce is not None:
            all_reduce(agreed)
        longest = int(agreed[:-1].max())
        if longest == 0:
            return
        spare = own[0] if own else spare
        own += [_without_targets(spare)] * (longest - len(own))
        micro_batches = tuple(MicroBatch(tensors, rank * longest + position) for position, tensors in enumerate(own))
        yield Window(step, micro_batches, int(agreed[-1]))
        step += 1


def shifted(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Hugging Face batch as a micro-batch's tensors.

    `labels` of the shape of `input_ids` `(batch, seq)` are a language model's, not yet shifted: target j becomes label
    j+1. It does not count where token j or j+1 is padding by `attention_mask` (never by token id: padding may
    share the end token's), nor where `position_ids` say that j+1 starts a document. A mask of that shape is dropped:
    positions start again where it changes, which keeps text and padding apart, as in packed rows.
    `targets` are taken as they are, and so are labels of another shape (a classifier's).
    Raises UserError if there are neither.
    """
    tensors = dict(batch)
    labels = tensors.pop("labels", None)
    inputs = tensors.get("input_ids")
    if "targets" not in tensors:
        if labels is None:
            raise UserError(f"a batch needs 'labels' or 'targets'; the loader's has {sorted(tensors)}")
        if inputs is None or labels.shape != inputs.shape:
            return {**tensors, "targets": labels}
    if inputs is None:
        return tensors
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    mask = tensors.get("attention_mask")
    if mask is not None and mask.shape == inputs.shape:
        padding = tensors.pop("attention_mask") == 0
    tensors["position_ids"] = _positions(padding, tensors.get("position_ids"))
    if "targets" not in tensors and labels is not None:
        tensors["targets"] = _shift(labels, tensors["position_ids"], padding)
    return tensors


def _shift(labels: Tensor, position_ids: Tensor, padding: Tensor) -> Tensor:
    """Targets `(batch, seq)` int64 of labels that stand at their own token."""
    targets = torch.full_like(labels, IGNORED, dtype=torch.int64)
    targets[:, :-1] = labels[:, 1:]
    targets[:, :-1][(position_ids[:, 1:] == 0) | padding[:, 1:] | padding[:, :-1]] = IGNORED
    return targets


def _positions(padding: Tensor, given: Tensor | None) -> Tensor:
    """Positions `(batch, seq)`: those given where there is no padding, else counted from 0 and again from each edge of
    padding, so that a model that sees positions only cannot attend across it."""
    if given is not None and not padding.any():
        return given
    index = torch.arange(padding.shape[1], device=padding.device).expand(padding.shape)
    edges = torch.zeros_like(padding)
    edges[:, 1:] = padding[:, 1:] != padding[:, :-1]
    if given is not None:
        edges[:, 1:] |= given[:, 1:] != given[:, :-1] + 1
    return index - torch.where(edges, index, 0).cummax(dim=1).values


def _without_targets(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """A copy that weighs nothing. A rank that never had a batch runs two tokens, enough to take part."""
    if tensors is None:
        inputs = torch.zeros(1, 2, dtype=torch.int64)
        tensors = {"input_ids": inputs, "targets": inputs, "position_ids": torch.arange(2)[None]}
    return {**tensors, "targets": torch.full_like(tensors["targets"], IGNORED)}
