"""Recompute changes no bit of the loss or of any gradient."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardlab.model.trainable import Trainable, make_trainable
from tests.distributed.models import Custom
from tests.model.families import batch, build, gpt2, llama, mixtral

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build(llama(dropout=0.3)),
    "tied llama": lambda: build(llama(tied=True, dropout=0.3)),
    "gpt2": lambda: build(gpt2(dropout=0.3)),
    "mixtral": lambda: build(mixtral(dropout=0.3)),
    "custom": lambda: _custom(),
}
EMBEDDING = {"gpt2": "transformer.wte.weight", "custom": "tokens.weight"}


def _custom() -> nn.Module:
    torch.manual_seed(0)
    return Custom(0.3)


def made(name: str, recompute: str, *, freeze: bool = False) -> Trainable:
    model = MODELS[name]()
    if freeze:
        model.get_parameter(EMBEDDING.get(name, "model.embed_tokens.weight")).requires_grad_(False)
    return make_trainable(model, seed=3, recompute=recompute).train()


def gradients(trainable: Trainable, step: int = 0, micro_batch: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    trainable.zero_grad()
    trainable.random.step, trainable.random.micro_batch = step, micro_batch
    loss = trainable(batch(), 23.0)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in trainable.named_canonical()}


@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen embedding"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_bit_equal_with_and_without(name: str, freeze: bool) -> None:
    """https://github.com/huggingface/transformers/issues/21381: checkpointing gave no gradients.

    The custom class has no embedding getter, on which other tools rely to mend that.
    """
    plain_loss, plain = gradients(made(name, "none", freeze=freeze))
    loss, recomputed = gradients(made(name, "full", freeze=freeze))
    assert torch.equal(loss, plain_loss)
    for tensor, gradient in plain.items():
        if gradient is None:  # frozen, or an expert that no token chose
            assert recomputed[tensor] is None
        else:
            assert torch.equal(recomputed[tensor], gradient), tensor
    frozen = [tensor for tensor, gradient in plain.items() if gradient is None and "experts" not in tensor]
    assert frozen == ([EMBEDDING.get(name, "model.embed_tokens.weight")] if freeze else [])


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_a_function_of_step_and_micro_batch(name: str) -> None:
    trainable = made(name, "none")
    first, _ = gradients(trainable, step=1, micro_batch=2)
    torch.rand(100)
    assert torch.equal(gradients(trainable, step=1, micro_batch=2)[0], first)
    assert not torch.equal(gradients(trainable, step=2, micro_batch=2)[0], first)
    assert not torch.equal(gradients(trainable, step=1, micro_batch=3)[0], first)


def test_every_block_is_run_again() -> None:
    """The comparisons above would hold if recompute did nothing."""
    calls = {"none": 0, "full": 0}
    for recompute in calls:
        trainable = made("llama", recompute)

        def count(*_: object, kind: str = recompute) -> None:
            calls[kind] += 1

        for block in trainable.blocks:
            block.mlp.register_forward_pre_hook(count)  # a recompute stops where nothing more is needed
        gradients(trainable)
        with torch.no_grad():
            trainable(batch(), 23.0)
    assert calls == {"none": 8, "full": 12}  # 4 blocks; without gradients nothing is run twice


def test_experts_are_chosen_alike_in_the_recomputed_pass() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/6438: another routing in the recomputed pass."""
    trainable = made("mixtral", "full")
    chosen: dict[str, list[Tensor]] = {}
    for name, module in trainable.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda _module, _arguments, output, name=name: chosen.setdefault(name, []).append(output[-1])
            )
    gradients(trainable)
    assert len(chosen) == 4
    for first, again in chosen.values():
        assert torch.equal(first, again)


def test_the_config_keeps_its_cache_switched_on(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/28056: the saved config had the cache off."""
    model = MODELS["llama"]()
    assert isinstance(model, transformers.PreTrainedModel)
    trainable = make_trainable(model, recompute="full")
    gradients(trainable)
    assert model.config.use_cache is True
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True) is True
