"""What would be wrong in silence: looked at on every rank before, in and after the first step."""

from collections.abc import Iterable

import torch

from shardlab.backends.base import all_reduce_sum, fingerprint
from shardlab.data import MicroBatch
from shardlab.model.trainable import Trainable, holds_packed_documents, refuse_packing
from shardlab.state.masks import Masks
from shardlab.topology import Topology


def check_buffers(module: Trainable, topology: Topology) -> None:
    """Rotary frequencies and the like are computed on every rank: RuntimeError where one differs."""
    names = [name for name, _ in module.named_buffers()]
    prints = torch.tensor([fingerprint(buffer) for _, buffer in module.named_buffers()], dtype=torch.float64)
    mine = prints.to(topology.device)
    first = all_reduce_sum(mine * topology.is_main, topology)
    unlike = (mine != first).to(torch.float64)
    for name, ranks in zip(names, all_reduce_sum(unlike, topology).tolist(), strict=True):
        if ranks:
            raise RuntimeError(f"the buffer {name} is not the same on all ranks")


def check_changed(module: Trainable, unchanged: Iterable[str], masks: Masks, lr: float) -> None:
    """After the first step: RuntimeError where tensors with a gradient are `unchanged` though no mask holds them."""
    left = [name for name in unchanged if masks.frees(name, module.shapes[name])]
    if left:
        raise RuntimeError(
            f"the first step, at learning rate {lr:g}, did not change {len(left)} of the trainable tensors "
            f"though they have a gradient, among them {left[0]}: the optimizer does not hold them, or the "
            "rate is below what fp32 can add"
        )


def check_documents(module: Trainable, batches: Iterable[MicroBatch]) -> None:
    """Rows of a user's own may hold several documents, or text behind padding, whatever the recipe says.

    Raises UserError where `module` can't keep them apart.
    """
    if not module.separates_documents and any(holds_packed_documents(batch.tensors) for batch in batches):
        refuse_packing(module)
