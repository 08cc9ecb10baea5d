"""HeadLoss against torch's cross-entropy in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.data.window import IGNORED
from shardlab.model.head import HeadLoss

HIDDEN, VOCABULARY = 16, 50


def make(*, bias: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> HeadLoss:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    norm = nn.LayerNorm(HIDDEN)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    return HeadLoss([norm], head, **options).to(dtype)


def sample(dtype: torch.dtype = torch.float32, ignored: int = 9) -> tuple[Tensor, Tensor]:
    """Hidden states (2, 21, hidden) and targets, the first `ignored` of each row not counted."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 21, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (2, 21), generator=generator)
    targets[:, :ignored] = IGNORED
    return hidden, targets


def reference(
    module: HeadLoss, hidden: Tensor, targets: Tensor, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in float64, of the values that the parameters have."""
    exact = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    x = hidden.detach().double().requires_grad_()
    normed = nn.functional.layer_norm(x, (HIDDEN,), exact["norms.0.weight"], exact["norms.0.bias"])
    logits = nn.functional.linear(normed, exact["head.weight"], exact.get("head.bias")) * module.multiplier
    if module.softcap is not None:
        logits = module.softcap * torch.tanh(logits / module.softcap)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (loss / denominator).backward()
    return loss.detach() / denominator, {"hidden": x.grad, **{name: value.grad for name, value in exact.items()}}


def assert_close(value: Tensor, expected: Tensor, tolerance: float) -> None:
    assert value.shape == expected.shape
    assert (value.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"multiplier": 0.25}, {"softcap": 0.5}, {"bias": True, "multiplier": 3.0, "softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 5, 42, 256])
def test_value_and_gradients_in_chunks_of_any_size(chunk: int, options: dict[str, Any]) -> None:
    module = make(chunk_tokens=chunk, **options)
    hidden, targets = sample()
    loss = module(hidden, targets, 37.0)
    loss.backward()
    expected, gradients = reference(module, hidden, targets, 37.0)
    assert_close(loss, expected, 1e-6)
    assert loss.dtype == torch.float32
    assert_close(hidden.grad, gradients.pop("hidden"), 1e-5)
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, gradients[name], 1e-5)


def test_without_gradients_the_value_is_the_same() -> None:
    module = make(chunk_tokens=5, softcap=2.0)
    hidden, targets = sample()
    with torch.no_grad():
        assert torch.equal(module(hidden, targets, 37.0), module(hidden.detach(), targets, 37.0))
    assert_close(module(hidden, targets, 37.0), reference(module, hidden, targets, 37.0)[0], 1e-6)


def test_without_any_target_the_loss_and_its_gradients_are_exactly_zero() -> None:
    """https://github.com/huggingface/trl/issues/6668: a fully masked batch made the weights NaN."""
    module = make(chunk_tokens=5, bias=True, softcap=2.0)
    hidden, targets = sample(ignored=21)
    loss = module(hidden, targets, 37.0)
    loss.backward()
    assert loss.item() == 0.0
    for gradient in (hidden.grad, *(parameter.grad for parameter in module.parameters())):
        assert torch.count_nonzero(gradient) == 0


def test_a_factor_from_outside_reaches_every_gradient() -> None:
    """DeepSpeed's average over ranks is undone by such a factor."""
    module = make(bias=True)
    hidden, targets = sample()
    (module(hidden, targets, 37.0) * 3).backward()
    _, gradients = reference(module, hidden, targets, 37.0 / 3)
    assert_close(hidden.grad, gradients["hidden"], 1e-5)
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, gradients[name], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_s_gradient_is_added_straight_into_a_buffer(dtype: torch.dtype) -> None:
    module = make(chunk_tokens=5, dtype=dtype)
    module.weight_gradient = torch.full((VOCABULARY, HIDDEN), 0.125)
    for _ in range(2):
        hidden, targets = sample(dtype)
        module(hidden, targets, 37.0).backward()
    _, gradients = reference(module, hidden, targets, 37.0)
    assert module.head.weight.grad is None
    assert module.weight_gradient.dtype == torch.float32
    added = (module.weight_gradient - 0.125) / 2
    assert_close(added, gradients["head.weight"], 1e-5 if dtype == torch.float32 else 1e-2)
    assert_close(hidden.grad, gradients["hidden"], 1e-5 if dtype == torch.float32 else 1e-2)


def test_the_buffer_does_not_move_with_the_number_of_rows_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the product is made by pieces of the vocabulary."""
    results = []
    for rows in (8192, 7):
        monkeypatch.setattr("shardlab.model.head._Gradients.ROWS", rows)
        module = make(chunk_tokens=5, dtype=torch.bfloat16)
        module.weight_gradient = torch.zeros(VOCABULARY, HIDDEN)
        module(*sample(torch.bfloat16), 37.0).backward()
        results.append(module.weight_gradient)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_small_terms_of_many_chunks_survive_in_bf16() -> None:
    """4000 chunks of one token: added up in bf16, each would be lost in the sum of those before it."""
    module = make(chunk_tokens=1, dtype=torch.bfloat16)
    module.head.weight.grad_dtype = torch.float32
    hidden = torch.randn(1, 4000, HIDDEN).bfloat16()
    targets = torch.randint(0, VOCABULARY, (1, 4000))
    module(hidden, targets, 4000.0).backward()
    _, gradients = reference(module, hidden, targets, 4000.0)
    assert module.head.weight.grad.dtype == torch.float32
    assert_close(module.head.weight.grad, gradients["head.weight"], 1e-2)


def test_a_frozen_head_gives_no_gradient_but_passes_it_on() -> None:
    module = make(bias=True)
    module.head.requires_grad_(False)
    module.weight_gradient = torch.zeros(VOCABULARY, HIDDEN)
    hidden, targets = sample()
    module(hidden, targets, 37.0).backward()
    assert_close(hidden.grad, reference(module, hidden, targets, 37.0)[1]["hidden"], 1e-5)
    assert module.head.weight.grad is None
    assert module.head.bias.grad is None
    assert torch.count_nonzero(module.weight_gradient) == 0


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("differentiate", [True, False])
def test_the_logits_never_exist_whole(differentiate: bool, dtype: torch.dtype) -> None:
    vocabulary, tokens, chunk = 1000, 512, 8
    module = HeadLoss([nn.LayerNorm(4)], nn.Linear(4, vocabulary, bias=False), chunk_tokens=chunk).to(dtype)
    hidden = torch.randn(1, tokens, 4).to(dtype).requires_grad_()
    with torch.set_grad_enabled(differentiate), LargestTensor() as largest:
        loss = module(hidden, torch.randint(0, vocabulary, (1, tokens)), 512.0)
        if differentiate:
            loss.backward()
    assert largest.elements == chunk * vocabulary  # one chunk's; the logits would be 64 times as many
