"""A rounded layer computes with the weight that a reader of the quantized file has, and learns as if it were plain."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shardlab.compress.packed import pack
from shardlab.errors import UserError
from shardlab.model.grid import find_scales
from shardlab.model.qat import RoundedLinear, command, round_layers
from shardlab.model.schemes import parse_scheme
from shardlab.recipe import QATSection


@pytest.mark.parametrize("scheme", ["int2g8", "int4g32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_plain_layer_with_the_weight_that_is_read_back(scheme: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 6).to(dtype)
    weight = layer.weight.detach().float()
    chosen = parse_scheme(scheme)
    read = pack(weight, find_scales(weight, chosen.grid, torch.bfloat16), chosen, torch.bfloat16)[1].to(dtype)
    given = torch.randn(3, 5, 64, dtype=dtype).requires_grad_()
    plain = nn.Parameter(read)
    expected = nn.functional.linear(given, plain, layer.bias)
    expected.square().sum().backward()
    wanted = (given.grad, plain.grad, layer.bias.grad)
    given.grad = layer.bias.grad = None
    assert round_layers(nn.ModuleDict({"one": layer}), QATSection(scheme=scheme))["one"].scheme == chosen
    assert isinstance(layer, RoundedLinear)
    result = layer(given)
    assert torch.equal(result, expected)
    result.square().sum().backward()
    for got, want in zip((given.grad, layer.weight.grad, layer.bias.grad), wanted, strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got, want)


def test_the_blocks_layers_and_no_others() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    section = QATSection(scheme="int4", group_size=16, local=("*.down_proj=int8", "*.layers.0.*=none"))
    choices = round_layers(model, section)
    rounded = {name for name, module in model.named_modules() if isinstance(module, RoundedLinear)}
    assert rounded == {name for name, choice in choices.items() if choice.scheme is not None}
    assert len(rounded) == 7
    assert all(name.startswith("model.layers.1.") for name in rounded)
    assert command(section) == (
        "--method rtn --scheme int4 --group-size 16 --local '*.down_proj=int8' --local '*.layers.0.*=none'"
    )


def test_what_is_refused_by_name() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(30, 4), "b": nn.Linear(32, 4)})
    with pytest.raises(UserError, match=r"groups don't divide a \(30 inputs\)"):
        round_layers(model, QATSection(scheme="int4", group_size=32))
    with pytest.raises(UserError, match=r"w8a8 \(a\) rounds inputs too"):
        round_layers(model, QATSection(scheme="w8a8"))
    with pytest.raises(UserError, match="one is a Own"):
        round_layers(nn.ModuleDict({"one": Own(32, 4)}), QATSection(scheme="int8"))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8))
    with pytest.raises(UserError, match="no linear layer to round"):
        round_layers(gpt2, QATSection(scheme="int8"))
