"""Recompute changes no bit of the loss or of any gradient."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.model import attention, policies
from shardlab.model.lora import inject
from shardlab.model.trainable import Trainable, make_trainable
from shardlab.recipe import LoraSection
from tests.distributed.models import Custom
from tests.model.families import CONFIGS, batch, build, gpt2, llama, mixtral

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build(llama(dropout=0.3)),
    "tied llama": lambda: build(llama(tied=True, dropout=0.3)),
    "gpt2": lambda: build(gpt2(dropout=0.3)),
    "mixtral": lambda: build(mixtral(dropout=0.3)),
    "custom": lambda: _custom(),
    "gemma2": lambda: build(CONFIGS["gemma2"]()),
    "adapters": lambda: _adapted(),
    "tiles": lambda: _tiled(),
}
POLICIES = ("selective", "full", "auto")
EMBEDDING = {"gpt2": "transformer.wte.weight", "custom": "tokens.weight"}


def _custom() -> nn.Module:
    torch.manual_seed(0)
    return Custom(0.3)


def _adapted() -> nn.Module:
    model = build(llama())
    torch.manual_seed(0)
    inject(model, LoraSection(rank=4, dropout=0.3))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and so then is the gradient of the other factor
            nn.init.normal_(parameter, std=0.1)
    return model


def _tiled() -> nn.Module:
    attention.register()
    model = build(llama())
    assert isinstance(model, transformers.PreTrainedModel)
    model.set_attn_implementation(attention.NAME)
    return model


def made(name: str, recompute: str, *, freeze: bool = False) -> Trainable:
    """`recompute` is a policy, or "auto": the first two blocks are run again, as where the others' memory is there."""
    model = MODELS[name]()
    if freeze:
        model.get_parameter(EMBEDDING.get(name, "model.embed_tokens.weight")).requires_grad_(False)
    trainable = make_trainable(model, seed=3)
    trainable.set_recompute("full" if recompute == "auto" else recompute, 2 if recompute == "auto" else None)
    return trainable.train()


def gradients(trainable: Trainable, step: int = 0, micro_batch: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    trainable.zero_grad()
    trainable.random.step, trainable.random.micro_batch = step, micro_batch
    loss = trainable(batch(), 23.0)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in trainable.named_canonical()}


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen embedding"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_bit_equal_with_and_without(name: str, freeze: bool, recompute: str) -> None:
    """https://github.com/huggingface/transformers/issues/21381: checkpointing gave no gradients.

    The custom class has no embedding getter, on which other tools rely to mend that.
    """
    plain_loss, plain = gradients(made(name, "none", freeze=freeze))
    loss, recomputed = gradients(made(name, recompute, freeze=freeze))
    assert torch.equal(loss, plain_loss)
    for tensor, gradient in plain.items():
        if gradient is None:  # frozen, or an expert that no token chose
            assert recomputed[tensor] is None
        else:
            assert torch.equal(recomputed[tensor], gradient), tensor
    embedding = EMBEDDING.get(name, "model.embed_tokens.weight")
    assert (plain[embedding] is None) == (freeze or name == "adapters")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma2", "tiles")])
def test_dropout_is_a_function_of_step_and_micro_batch(name: str) -> None:
    trainable = made(name, "none")
    first, _ = gradients(trainable, step=1, micro_batch=2)
    torch.rand(100)
    assert torch.equal(gradients(trainable, step=1, micro_batch=2)[0], first)
    assert not torch.equal(gradients(trainable, step=2, micro_batch=2)[0], first)
    assert not torch.equal(gradients(trainable, step=1, micro_batch=3)[0], first)


def test_every_block_is_run_again() -> None:
    """The comparisons above would hold if recompute did nothing."""
    calls = {"none": 0, "full": 0, "auto": 0}
    for recompute in calls:
        trainable = made("llama", recompute)

        def count(*_: object, kind: str = recompute) -> None:
            calls[kind] += 1

        for block in trainable.blocks:
            block.mlp.register_forward_pre_hook(count)  # a recompute stops where nothing more is needed
        gradients(trainable)
        with torch.no_grad():
            trainable(batch(), 23.0)
    assert calls == {"none": 8, "full": 12, "auto": 10}  # 4 blocks; without gradients nothing is run twice


class Counted(TorchDispatchMode):
    """How often each operator is run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def operators(recompute: str, model: Callable[[], nn.Module] = lambda: build(llama())) -> Counter[str]:
    trainable = make_trainable(model(), recompute=recompute).train()
    with Counted() as counted:
        gradients(trainable)
    return counted.calls


def test_selective_runs_every_other_product_again_and_no_attention() -> None:
    """Of a block's seven (q, k, v, output, gate, up, down) the second, fourth and sixth; four blocks."""
    none, selective, full = (operators(recompute) for recompute in ("none", "selective", "full"))
    attention_kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert selective["mm"] == none["mm"] + 4 * 3
    assert full["mm"] == none["mm"] + 4 * 6, "nothing asks for the last one's result"
    assert selective[attention_kernel] == none[attention_kernel] == 4
    assert full[attention_kernel] == 8
    assert selective["silu"] == full["silu"] == 2 * none["silu"]


def test_selective_runs_no_tile_of_attention_again_but_its_scores() -> None:
    """The probabilities, which are larger than all else, are made again by the backward pass; the output is kept."""
    none, selective, full = (operators(recompute, _tiled) for recompute in ("none", "selective", "full"))
    assert selective["baddbmm"] == full["baddbmm"] == 2 * none["baddbmm"] == 16
    assert selective["bmm"] == none["bmm"]
    assert full["bmm"] == none["bmm"] + 8, "two rows of unlike documents in four blocks"


class _Added(torch.autograd.Function):
    """As DeepSpeed's linear for ZeRO-3: the bias is added in place to a product that torch has reshaped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        output = x.matmul(weight.t())
        output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.flatten(0, 1)
        return gradient.matmul(weight), rows.t().matmul(x.flatten(0, 1)), rows.sum(0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(_Added.apply(x, self.first.weight, self.first.bias))
        hidden = self.third(torch.tanh(self.second(hidden).mul_(0.5))).relu_()
        return self.first(hidden)


class InPlace(nn.Module):
    """Its products are changed in place: within an operator, by the block, and after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(8, 8), _Block()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = self.block(torch.tanh(self.layer(batch["x"])))
        output.mul_(2.0)
        return output.square().sum(), torch.tensor(len(batch["x"]))


def test_a_product_that_is_changed_in_place_is_made_again() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 5, 8), InPlace()
    found = []
    for recompute in ("none", "selective"):
        trainable = make_trainable(copy.deepcopy(model), recompute=recompute).train()
        trainable({"x": x}, 1.0).backward()
        found.append([parameter.grad for parameter in trainable.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_of_attention_that_drops_out() -> None:
    """A kernel that draws random numbers, left out, would leave other ones to what is run again after it."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert policies._draws(kernel, (None, None, None, 0.1), {})
    assert policies._draws(kernel, (None, None, None), {"dropout_p": 0.1})
    assert not policies._draws(kernel, (None, None, None), {})


@pytest.mark.parametrize("recompute", POLICIES)
def test_experts_are_chosen_alike_in_the_recomputed_pass(recompute: str) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/6438: another routing in the recomputed pass."""
    trainable = made("mixtral", recompute)
    chosen: dict[str, list[Tensor]] = {}
    for name, module in trainable.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda _module, _arguments, output, name=name: chosen.setdefault(name, []).append(output[-1])
            )
    gradients(trainable)
    assert [len(found) for found in chosen.values()] == ([2, 2, 1, 1] if recompute == "auto" else [2] * 4)
    for first, *again in chosen.values():
        assert all(torch.equal(first, one) for one in again)


def test_the_config_keeps_its_cache_switched_on(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/28056: the saved config had the cache off."""
    model = MODELS["llama"]()
    assert isinstance(model, transformers.PreTrainedModel)
    trainable = make_trainable(model, recompute="full")
    gradients(trainable)
    assert model.config.use_cache is True
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True) is True
