"""Attention on a CPU, in tiles of queries: plain batched products and softmax over the keys that a tile can see.

torch's own kernel takes more than twice as long there (bf16, forward and backward). A tile leaves out the keys that its
mask forbids to all of its queries: those after it, those of other documents in a packed row, those outside a window.
Scores are rounded to the queries' type, as in transformers' eager attention; the sums over tiles are in fp32.

`register` makes it known to transformers as `NAME`. What it does not do (dropout, a bias that is learned, generation
with a cache, other devices), or not faster (long rows of one document in fp32), goes to torch's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardlab.model import policies

NAME = "shardlab_tiles"
TILE = 128  # queries; a multiple of what a product likes, small enough to leave out nearly half
KEPT_TOKENS = 1024  # with more keys the probabilities are not kept for the backward pass but made again


def register() -> None:
    """Make `NAME` a value for a config's `attn_implementation`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def leave_uncompiled() -> None:
    """A compiled block calls it between its graphs: which tiles there are follows from the mask's values."""
    if NAME in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, torch.compiler.disable(attention))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query (batch, heads, tokens, head dim); key and value with as many heads or a divisor.

    `attention_mask` is a boolean (batch or 1, 1, queries, keys), True where a query sees a key; None: causal. Returns
    (batch, tokens, heads, head dim).
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    ours = (
        query.device.type == "cpu"
        and dropout == 0.0
        and causal
        and query.shape[2] == key.shape[2]
        and not (attention_mask is None and query.dtype == torch.float32 and query.shape[2] > KEPT_TOKENS)
        and (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
        and all(others.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    )
    if not ours:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = None if attention_mask is None else attention_mask[:, 0]
    results = policies.kept()
    if results is None:
        output = _Tiles.apply(query, key, value, mask, scale, True, [])
    else:
        given = results.take(attention)
        output = _Tiles.apply(query, key, value, mask, scale, False, [] if given is None else [given])
        results.put(attention, output)
    return output, None


@dataclass(frozen=True)
class _Tile:
    """Queries [start, end) of the rows [row, row_end), which see keys of [first, end) only."""

    rows: slice
    start: int
    end: int
    first: int


def tiles(mask: Tensor | None, rows: int, tokens: int) -> list[_Tile]:
    """What there is to compute under `mask` (rows or 1, queries, keys; None: causal).

    Rows whose masks differ are apart: their documents begin at different tokens. A mask without values (a trace's) is
    taken to be causal.
    """
    edges = [(start, min(start + TILE, tokens)) for start in range(0, tokens, TILE)]
    if mask is None or isinstance(mask, FakeTensor) or mask.device.type == "meta":
        return [_Tile(slice(0, rows), start, end, 0) for start, end in edges]
    shared = mask.shape[0] == 1
    found = []
    for row in range(1 if shared else rows):
        for start, end in edges:
            seen = mask[row, start:end].any(dim=0)
            first = int(seen.to(torch.uint8).argmax()) // TILE * TILE if tokens > TILE else 0
            found.append(_Tile(slice(0, rows) if shared else slice(row, row + 1), start, end, first))
    return found


class _Tiles(torch.autograd.Function):
    """Softmax(QK')V and its gradient, a tile after another.

    `keep`: the probabilities, for the backward pass, unless there are too many. `given` holds the output where it was
    made before, in which case only its gradient is prepared.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        keep: bool,
        given: list[Tensor],
    ) -> Tensor:
        rows, heads, tokens, _ = query.shape
        ctx.scale, ctx.tiles = scale, tiles(mask, rows, tokens)
        output = given[0] if given else query.new_empty(rows, tokens, heads, value.shape[-1])
        keep = keep and key.shape[2] <= KEPT_TOKENS and any(ctx.needs_input_grad[:3])
        probabilities = []
        for tile in () if given else ctx.tiles:
            p = _probabilities(query, key, mask, tile, scale)
            _put(output, torch.bmm(p, _keys(value, tile)), tile)
            if keep:
                probabilities.append(p)
        ctx.save_for_backward(query, key, value, mask, output, *probabilities)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, *kept = ctx.saved_tensors
        (gradient,) = gradients
        d_query = torch.empty_like(query)
        d_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
        d_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
        for number, tile in enumerate(ctx.tiles):
            p = kept[number] if kept else _probabilities(query, key, mask, tile, ctx.scale)
            g = _queries(gradient.transpose(1, 2), key.shape[1], tile)
            o = _queries(output.transpose(1, 2), key.shape[1], tile)
            _add(d_value, torch.bmm(p.transpose(1, 2), g), tile)
            d_score = torch.bmm(g, _keys(value, tile).transpose(1, 2))
            d_score.sub_((g * o).sum(-1, keepdim=True, dtype=torch.float32).to(g.dtype)).mul_(p)
            q = _queries(query, key.shape[1], tile)
            _put(d_query.transpose(1, 2), torch.bmm(d_score, _keys(key, tile)).mul_(ctx.scale), tile)
            _add(d_key, torch.bmm(d_score.transpose(1, 2), q), tile)
        return d_query, d_key.mul_(ctx.scale).to(key.dtype), d_value.to(value.dtype), None, None, None, None


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, tile: _Tile, scale: float) -> Tensor:
    """(rows x key heads, group x queries, keys) of a tile."""
    groups = query.shape[1] // key.shape[1]
    bias = _bias(query, mask, tile)
    q = _queries(query, key.shape[1], tile)
    # One bias for all heads: expanded, not copied, but for a group's queries, which lie one after another.
    if groups > 1:
        bias = bias.repeat(1, groups, 1)
    scores = torch.baddbmm(bias.expand(q.shape[0], -1, -1), q, _keys(key, tile).transpose(1, 2), alpha=scale)
    return torch.softmax(scores, dim=-1)


def _bias(query: Tensor, mask: Tensor | None, tile: _Tile) -> Tensor:
    """(1, queries, keys): 0 where a key is seen, else what softmax makes 0; finite, so a blind row is no NaN."""
    hidden = torch.finfo(query.dtype).min
    size = (tile.end - tile.start, tile.end - tile.first)
    bias = torch.zeros(size, dtype=query.dtype, device=query.device)
    if mask is None:
        visible = torch.ones(size, dtype=torch.bool, device=query.device).tril_(tile.start - tile.first)
    else:
        visible = mask[tile.rows.start if mask.shape[0] > 1 else 0, tile.start : tile.end, tile.first : tile.end]
    return bias.masked_fill_(visible.logical_not(), hidden)[None]


def _keys(tensor: Tensor, tile: _Tile) -> Tensor:
    """(rows x key heads, keys, head dim) of keys or values."""
    part = tensor[tile.rows, :, tile.first : tile.end]
    return part.reshape(-1, *part.shape[2:])


def _queries(tensor: Tensor, key_heads: int, tile: _Tile) -> Tensor:
    """(rows x key heads, group x queries, head dim) of something (rows, heads, tokens, head dim)."""
    part = tensor[tile.rows, :, tile.start : tile.end]
    return part.reshape(part.shape[0] * key_heads, -1, part.shape[-1])


def _put(output: Tensor, result: Tensor, tile: _Tile) -> None:
    """A tile's (rows x key heads, group x queries, head dim) into (rows, tokens, heads, head dim)."""
    part = output[tile.rows, tile.start : tile.end]
    part.copy_(result.view(part.shape[0], part.shape[2], part.shape[1], part.shape[3]).transpose(1, 2))


def _add(total: Tensor, result: Tensor, tile: _Tile) -> None:
    part = total[tile.rows, :, tile.first : tile.end]
    part.add_(result.view(part.shape))
