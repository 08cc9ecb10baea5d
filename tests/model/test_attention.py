"""Attention in tiles against float64, value and gradients."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlab.backends.materialize import Materializer
from shardlab.errors import UserError
from shardlab.model import attention as subject
from shardlab.model.attention import KEPT_TOKENS, TILE, attention, tiles
from shardlab.model.build import build_model
from shardlab.model.trainable import CausalLM, make_trainable
from shardlab.recipe import ModelSection
from tests.model.families import CONFIGS, VOCABULARY, batch, build, inputs


class Layer(nn.Module):
    """What transformers hands over of a layer."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def documents(tokens: int, *starts: tuple[int, ...], window: int | None = None) -> Tensor:
    """Masks (rows, 1, tokens, tokens): causal, and within documents that begin at `starts` of each row."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    masks = []
    for row in starts:
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        inside = torch.zeros(tokens, dtype=torch.long)
        for start in row:
            inside[start:] += 1
        masks.append(visible & (inside[:, None] == inside[None]))
    return torch.stack(masks)[:, None]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """float64, whole."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = documents(q.shape[2], (0,)) if mask is None else mask
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"tokens": 300},
    "one tile": {"tokens": 17},
    "whole tiles": {"tokens": 2 * TILE},
    "three queries to a key": {"tokens": 200, "heads": 6, "key_heads": 2},
    "packed alike": {"tokens": 300, "mask": documents(300, (0, 10, 150, 290))},
    "packed apart": {"tokens": 300, "mask": documents(300, (0, 130, 256), (0, 5, 299)), "key_heads": 2},
    "window": {"tokens": 400, "mask": documents(400, (0,), window=50)},
    "window, packed": {"tokens": 400, "mask": documents(400, (0, 129), (0, 390), window=200)},
    "long": {"tokens": KEPT_TOKENS + 70, "heads": 1, "key_heads": 1},
    "long, packed": {
        "tokens": KEPT_TOKENS + 70, "heads": 2, "key_heads": 1, "mask": documents(KEPT_TOKENS + 70, (0, 600), (0, 900)),
    },
    "another scale": {"tokens": 150, "scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradients_are_float64s(case: dict[str, Any], dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    heads = case.get("heads", 4)
    key_heads, tokens, scale, mask = case.get("key_heads", heads), case["tokens"], case.get("scale"), case.get("mask")
    # As projections make them: heads beside one another, then transposed.
    tensors = [torch.randn(2, tokens, n, 16).to(dtype).transpose(1, 2) for n in (heads, key_heads, key_heads)]
    gradient = torch.randn(2, tokens, heads, 16).to(dtype)

    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    output, _ = attention(Layer(heads // key_heads), *ours, mask, scaling=scale)
    output.backward(gradient)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    expected = reference(*exact, mask, 0.25 if scale is None else scale)
    expected.backward(gradient.double())

    assert output.dtype == dtype
    assert distance(output, expected) < error
    for got, wanted in zip(ours, exact, strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert got.grad.dtype == dtype
        assert distance(got.grad, wanted.grad) < error


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative, L2."""
    return float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())


def test_keys_that_no_query_of_a_tile_sees_are_left_out() -> None:
    packed = documents(4 * TILE, (0, 2 * TILE), (0, TILE - 1))
    found = tiles(packed[:, 0], 2, 4 * TILE)
    first = {(tile.rows.start, tile.start // TILE): tile.first // TILE for tile in found}
    assert first == {(0, 0): 0, (0, 1): 0, (0, 2): 2, (0, 3): 2, (1, 0): 0, (1, 1): 0, (1, 2): 0, (1, 3): 0}
    assert all(tile.end % TILE == 0 for tile in found)
    window = tiles(documents(4 * TILE, (0,), window=TILE)[:, 0], 2, 4 * TILE)
    assert [(tile.start - tile.first) // TILE for tile in window] == [0, 1, 1, 1]
    assert all(tile.rows == slice(0, 2) for tile in window), "rows of one mask go together"
    assert all(one.end == two.start for one, two in pairwise(window))


@pytest.mark.parametrize(
    "given",
    [
        {"dropout": 0.1},
        {"is_causal": False},
        {"position_bias": torch.zeros(1, 4, 9, 9)},
        {"attention_mask": torch.zeros(1, 1, 9, 9)},
    ],
)
def test_what_it_does_not_do_goes_to_torchs(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(subject, "sdpa_attention_forward", lambda *a, **k: called.append((a, k)) or (None, None))
    tensors = [torch.randn(1, 4, 9, 8) for _ in range(3)]
    attention(Layer(1), *tensors, **({"attention_mask": None} | given))
    assert len(called) == 1


def test_a_row_that_sees_nothing_is_finite() -> None:
    mask = documents(8, (0,))
    mask[0, 0, 3] = False
    tensors = [torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3)]
    output, _ = attention(Layer(1), *tensors, mask)
    output.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in tensors if tensor.grad is not None)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "gemma2"])
@torch.no_grad()
def test_every_family_computes_with_it_what_it_computes_without(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows over several tiles; fp32."""
    monkeypatch.setattr(subject, "TILE", 4)
    plain = build(CONFIGS[family]())
    plain.save_pretrained(tmp_path)
    expected = plain.eval()(**inputs(batch()), use_cache=False).logits
    section = ModelSection(path=str(tmp_path), attention="tiles")
    model, weights = build_model(section, vocabulary=VOCABULARY, eos_token_id=2, sequence_length=12, seed=0)
    trainable = make_trainable(model).eval()
    assert isinstance(trainable, CausalLM)
    Materializer(trainable, weights, torch.device("cpu")).materialize(trainable)
    got = trainable.logits(batch())
    assert torch.allclose(got, expected, atol=1e-5)
    assert not torch.equal(got, expected), "it was not used"


def test_a_family_that_torchs_kernel_can_not_serve_is_refused(tmp_path: Path) -> None:
    CONFIGS["gemma2"]().save_pretrained(tmp_path)
    section = ModelSection(config=str(tmp_path / "config.json"), attention="tiles")
    with pytest.raises(UserError, match=r"model\.attention: tiles stands in for .* which gemma2 can't use"):
        build_model(section, vocabulary=VOCABULARY, eos_token_id=2, sequence_length=12, seed=0)
