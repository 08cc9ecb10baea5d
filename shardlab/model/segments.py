"""Take any Hugging Face decoder apart: embedding, blocks, head; no code per family.

What the parts are is found by running the model's own forward pass on the meta device and watching which module calls
which: the blocks are the largest list of equal modules, the tail is every leaf called after the last block. Families
that give each layer another mask, or position embeddings made outside the layers, need nothing special: `capture`
records the arguments that the model's own forward gives to each block.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from shardlab.errors import UserError

# Attributes of a config that say what the model does to its head's output. Others of that kind are refused: a loss that
# leaves one out would be wrong without a word.
_MULTIPLIERS = {"logit_scale": lambda value: value, "logits_scaling": lambda value: 1.0 / value}
_SOFTCAP = "final_logit_softcapping"


@dataclass(frozen=True)
class Anatomy:
    """Names, relative to the model, of the parts of a causal language model."""

    body: str  # the base model: embedding, blocks, and what else stands before the head
    blocks: str  # the list of blocks
    tail: tuple[str, ...]  # leaf modules called between the last block and the head, in order
    tuple_output: (
        int | None
    )  # a block returns a tuple of this length whose first item is the hidden state; None: a tensor
    separates_documents: bool  # whether the attention mask follows position_ids: else packed documents see each other


def dissect(model: nn.Module) -> Anatomy:
    """Find the parts of a causal language model. Raises UserError if it has no list of blocks or no linear head."""
    blocks_name, blocks = _largest_list(model)
    head = output_embeddings(model)
    body_name = getattr(model, "base_model_prefix", "")
    if not isinstance(head, nn.Linear) or not hasattr(model, body_name):
        raise UserError(
            f"{type(model).__name__} is not a causal language model with a linear head: "
            "give it a forward(batch) that returns (summed loss, count) instead"
        )
    # bf16: the fused kernels of expert layers have shape rules for no other type.
    probe = copy.deepcopy(model).to("meta", torch.bfloat16).eval()
    last = probe.get_submodule(f"{blocks_name}.{len(blocks) - 1}")
    body = getattr(probe, body_name)
    after: list[str] = []
    outputs: list[Any] = []

    def leave_last_block(_module: nn.Module, _arguments: Any, output: Any) -> None:
        outputs.append(output)

    names = {module: name for name, module in probe.named_modules()}
    hooks = [last.register_forward_hook(leave_last_block)]
    for module in body.modules():
        if not list(module.children()):
            hooks.append(
                module.register_forward_pre_hook(lambda module, _: after.append(names[module]) if outputs else None)
            )
    # Fake tensors: the masking code of transformers then leaves out its checks of values, which a meta tensor has not.
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _positions_looked_at() as looked_at:
        body(input_ids=tokens, position_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    output = outputs[0]
    tuple_output = len(output) if isinstance(output, tuple) else None
    return Anatomy(body_name, blocks_name, tuple(after), tuple_output, bool(looked_at))


@contextmanager
def _positions_looked_at() -> Iterator[list[Any]]:
    """What transformers' masking code is given as `position_ids` inside; nothing where a model keeps them from it.

    Only there are packed documents told apart, and no error says that a family leaves it out.
    """
    looked_at: list[Any] = []
    find = masking_utils.find_packed_sequence_indices

    def note(position_ids: Any) -> Any:
        looked_at.append(position_ids)
        return find(position_ids)

    masking_utils.find_packed_sequence_indices = note
    try:
        yield looked_at
    finally:
        masking_utils.find_packed_sequence_indices = find


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The head of a Hugging Face model; None where it has none, or is of another kind."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = getter() if getter is not None else None
    return head


def output_transform(config: Any) -> tuple[float, float | None]:
    """(multiplier, softcap) that a model applies to its head's output. Raises UserError for a rule not known here."""
    multiplier = 1.0
    for name, value in config.to_dict().items():
        if not name.startswith(("logit", "output_multiplier")) or not isinstance(value, (int, float)):
            continue
        if name in _MULTIPLIERS:
            multiplier *= _MULTIPLIERS[name](value)
        elif value not in (0, 1):
            raise UserError(
                f"this model's config changes its logits by `{name}: {value}`, which shardlab does not know"
            )
    return multiplier, getattr(config, _SOFTCAP, None)


def _largest_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            if best is None or size > best[0]:
                best = (size, name, module)
    if best is None:
        raise UserError(f"{type(model).__name__} has no list of blocks to shard by")
    return best[1], best[2]


@dataclass(frozen=True)
class BlockCall:
    """What the model's own forward passes to one block beside the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Capture:
    """The embedding's output (batch, sequence, hidden) and each block's own arguments, for one batch."""

    hidden: Tensor
    calls: tuple[BlockCall, ...]

    def run_block(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """The output of block `index` for `hidden`, given what the model's own forward would give it."""
        call = self.calls[index]
        output = block(hidden, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output


def capture(body: nn.Module, blocks: nn.ModuleList, tuple_output: int | None, inputs: Mapping[str, Tensor]) -> Capture:
    """Run the model's own forward with its blocks standing in for themselves, and record what each is called with."""
    calls: list[tuple[Tensor, BlockCall]] = []

    def stand_in(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((hidden, BlockCall(args, kwargs)))
        return hidden if tuple_output is None else (hidden, *(None for _ in range(tuple_output - 1)))

    originals = [block.forward for block in blocks]
    try:
        for block in blocks:
            block.forward = stand_in
        body(**inputs, use_cache=False)
    finally:
        for block, forward in zip(blocks, originals, strict=True):
            block.forward = forward
    return Capture(calls[0][0], tuple(call for _, call in calls))
