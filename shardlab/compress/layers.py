"""Whole blocks of a model go: which add the least, and what the others are called afterwards."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.compress.units import By
from shardlab.compress.walk import Segment, Walk

_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")  # a family's config has one of them
_INDICES = ("mlp_only_layers",)  # keys that list blocks by number


def block_scores(walk: Walk, by: By = "influence") -> list[float]:
    """What each block matters, over the calibration rows; the smallest goes first.

    influence: 1 - the mean cosine of a token's hidden state before and after it (arXiv 2403.03853); activation: the
    mean square of what it adds; magnitude: its weights' mean square, which no rows are needed for.
    """
    if by == "magnitude":
        return [_mean_square(walk, index) for index in range(walk.blocks)]
    scores: list[float] = []

    def change(segment: Segment) -> Iterator[tuple[str, Tensor]]:
        if segment.name:
            scores.append(_observed(segment, by))
        yield from ()

    for _ in walk.run(change, judged=False):
        raise AssertionError("nothing is written")
    return scores


def _mean_square(walk: Walk, index: int) -> float:
    names = list(walk.block_shapes(index))
    squares = sum(float(walk.weights.tensor(name).double().square().sum()) for name in names)
    return squares / sum(shape.numel() for shape in walk.block_shapes(index).values())


def _observed(segment: Segment, by: By) -> float:
    total, tokens = 0.0, 0

    def see(_block: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        nonlocal total, tokens
        before = arguments[0].flatten(0, -2).float()
        after = (output[0] if isinstance(output, tuple) else output).flatten(0, -2).float()
        if by == "influence":
            each = 1 - nn.functional.cosine_similarity(before, after, dim=-1)
        else:
            each = (after - before).square().mean(-1)
        total += float(each.double().sum())
        tokens += len(before)

    hook = segment.module.register_forward_hook(see)
    segment.observe()
    hook.remove()
    return total / max(tokens, 1)


def largest(scores: Iterable[float], number: int) -> list[int]:
    """The places of the `number` largest, in order; of equals the first."""
    listed = list(scores)
    return sorted(sorted(range(len(listed)), key=lambda i: -listed[i])[:number])


def renumbered(name: str, blocks: str, keep: Sequence[int]) -> str | None:
    """The name of the tensor `name` in the model of the blocks `keep`; None where its block is none of them.

    `blocks` is the name of the list of blocks, such as "model.layers".
    """
    prefix = f"{blocks}."
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{keep.index(int(number))}.{rest}" if int(number) in keep else None


def config_of_layers(config: Mapping[str, Any], keep: Sequence[int], blocks: int) -> dict[str, Any]:
    """`config` (of a model of `blocks` blocks) for the blocks `keep`: their number, and what is listed for each."""
    changed = dict(config)
    for key, value in config.items():
        if key in _COUNTS and value == blocks:
            changed[key] = len(keep)
        elif key in _INDICES and isinstance(value, list):
            changed[key] = [keep.index(block) for block in value if block in keep]
        elif isinstance(value, list) and len(value) == blocks:
            changed[key] = [value[block] for block in keep]
    return changed


def shapes_of_layers(shapes: Mapping[str, torch.Size], blocks: str, keep: Sequence[int]) -> dict[str, torch.Size]:
    """`shapes` by the names of the model of the blocks `keep`."""
    named = ((renumbered(name, blocks, keep), shape) for name, shape in shapes.items())
    return {name: shape for name, shape in named if name is not None}
