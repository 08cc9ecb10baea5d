"""Weights made one at a time, by replaying what the model's own code does to them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardlab.backends.materialize import Materializer
from shardlab.model.deferred import DeferredWeights, ModuleWeights, build_deferred
from shardlab.model.randomness import name_seed
from shardlab.model.trainable import CausalLM, make_trainable
from tests.model.families import CONFIGS, TIED, batch, build, gpt2, inputs, llama

CPU = torch.device("cpu")


def deferred(family: str, seed: int = 0) -> tuple[nn.Module, DeferredWeights]:
    model, weights = build_deferred(lambda: build(CONFIGS[family]()), seed)
    assert isinstance(weights, DeferredWeights)
    return model, weights


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_take_no_memory_and_buffers_are_those_of_a_plain_model(family: str) -> None:
    """https://github.com/huggingface/transformers/issues/48892: after meta init rotary frequencies were garbage."""
    model, _ = deferred(family)
    plain = build(CONFIGS[family]())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == {
        name: parameter.shape for name, parameter in plain.named_parameters()
    }
    buffers, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name
    if family == "llama":
        assert buffers["model.rotary_emb.inv_freq"].tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_have_the_distribution_that_the_family_gives_them(family: str) -> None:
    _, weights = deferred(family)
    plain = build(CONFIGS[family]())
    for name, parameter in plain.named_parameters():
        value, expected = weights.tensor(name), parameter.detach()
        assert value.shape == expected.shape
        assert value.dtype == torch.float32
        if expected.std() == 0 or expected.numel() == 1:
            assert torch.equal(value, expected), name
            continue
        assert not torch.equal(value, expected)
        noise = 6 / expected.numel() ** 0.5  # six standard errors, of two samples
        assert value.std() / expected.std() == pytest.approx(1, abs=noise), name
        assert abs(value.mean() - expected.mean()) < noise * expected.std(), name
        assert torch.equal((value == 0).all(-1), (expected == 0).all(-1)), f"{name}: rows of zeros, as for padding"


def test_branches_of_gpt2_start_smaller_with_depth() -> None:
    """Radford et al., 2019: the projections back into the residual stream are scaled by 1 / sqrt(2 layers)."""
    _, weights = deferred("gpt2")
    for index in range(4):
        for part in ("attn.c_proj", "mlp.c_proj"):
            value = weights.tensor(f"transformer.h.{index}.{part}.weight")
            assert value.std() == pytest.approx(gpt2().initializer_range / 8**0.5, rel=0.1)
        assert weights.tensor(f"transformer.h.{index}.mlp.c_fc.weight").std() == pytest.approx(0.02, rel=0.1)


def test_a_value_depends_on_seed_and_name_only() -> None:
    model, weights = deferred("llama")
    forwards = {name: weights.tensor(name) for name in names(model)}
    torch.rand(3)
    again, weights_again = deferred("llama")
    for name in reversed(names(again)):
        assert torch.equal(weights_again.tensor(name), forwards[name]), name
    other = deferred("llama", seed=1)[1]
    q = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)]
    assert not any(torch.equal(forwards[name], other.tensor(name)) for name in q)
    assert len({float(forwards[name].sum()) for name in q}) == 4


def test_the_generator_of_the_user_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, weights = deferred("llama")
    for name in names(model):
        weights.tensor(name)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", sorted(TIED))
def test_ties_are_kept(family: str) -> None:
    """https://github.com/huggingface/accelerate/issues/2155: the head was tied no longer after meta init."""
    model, weights = deferred(family)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    trainable = make_trainable(model)
    assert isinstance(trainable, CausalLM)
    materializer = Materializer(trainable, weights, CPU)
    for unit in [trainable.tail, *trainable.blocks, trainable]:  # the head first: the order must not matter
        materializer.materialize(unit)
    assert trainable.tail.head.weight is trainable.body.get_input_embeddings().weight
    assert not any(parameter.is_meta for parameter in trainable.parameters())
    for name, parameter in trainable.named_canonical():
        assert torch.equal(parameter, weights.tensor(name)), name


@torch.no_grad()
def test_logits_are_those_of_a_plain_model_with_the_same_weights() -> None:
    """Buffers included: one wrong rotary frequency would show."""
    plain = build(llama()).eval()
    model, _ = deferred("llama", seed=9)
    trainable = make_trainable(model).eval()
    Materializer(trainable, ModuleWeights(plain), CPU).materialize(trainable)
    assert isinstance(trainable, CausalLM)
    assert torch.equal(trainable.logits(batch()), plain(**inputs(batch()), use_cache=False).logits)


class Initialised(nn.Module):
    """One weight, initialised by `rule`."""

    def __init__(self, rule: Callable[[Tensor], object]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        rule(self.weight)


@pytest.mark.parametrize(
    "rule",
    [nn.init.uniform_, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.ones_],
    ids=lambda rule: rule.__name__,
)
def test_torch_s_initialisers_are_replayed_exactly(rule: Callable[..., object]) -> None:
    _model, weights = build_deferred(lambda: Initialised(rule), 3)
    assert isinstance(weights, DeferredWeights)
    expected = torch.empty(6, 4)
    generator = torch.Generator().manual_seed(name_seed(3, "weight"))
    rule(expected, **({} if rule is nn.init.ones_ else {"generator": generator}))
    assert torch.equal(weights.tensor("weight"), expected)


def _several_steps(weight: Tensor) -> None:
    with torch.no_grad():
        weight.normal_()
        weight[2:4].zero_()
        weight.mul_(2.0).clamp_(-1, 1)
        weight[:, 0] = torch.arange(6.0)


def test_views_and_several_steps_are_replayed() -> None:
    value = build_deferred(lambda: Initialised(_several_steps), 0)[1].tensor("weight")
    assert torch.equal(value[:, 0], torch.arange(6.0))
    assert torch.count_nonzero(value[2:4, 1:]) == 0
    assert value[:2, 1:].abs().max() <= 1
    assert value[:2, 1:].std() > 0


@pytest.mark.parametrize(
    "build_one",
    [
        lambda: Initialised(nn.init.orthogonal_),
        lambda: Initialised(nn.init.trunc_normal_),  # since torch 2.13 it draws until every value is inside
        lambda: Initialised(lambda weight: weight.data.copy_(weight.data.new_empty(6, 4).uniform_(1, 2))),
        lambda: _with_values(nn.Parameter(torch.arange(24.0).view(6, 4) / 3)),
    ],
    ids=["orthogonal", "truncated normal", "copied from another tensor", "given values"],
)
def test_what_cannot_be_replayed_is_built_for_real(build_one: Callable[[], nn.Module]) -> None:
    model, weights = build_deferred(build_one, 0)
    torch.manual_seed(0)
    expected = build_one()
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta
        assert torch.equal(parameter, expected.get_parameter(name))
        assert torch.equal(weights.tensor(name), parameter)


def _with_values(parameter: nn.Parameter) -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_parameter("extra", parameter)
    return module


def test_a_missing_name_is_a_key_error() -> None:
    _model, weights = deferred("llama")
    for source in (weights, ModuleWeights(build(llama()))):
        with pytest.raises(KeyError):
            source.tensor("model.nothing")
