"""A model taken apart gives what the whole one gives: no family is known by name."""

import pytest
import torch
import transformers
from torch import nn

from shardlab.errors import UserError
from shardlab.model.segments import output_transform
from shardlab.model.trainable import CausalLM, Summed, holds_packed_documents, make_trainable, refuse_packing
from tests.model.families import CONFIGS, TIED, VOCABULARY, batch, build, inputs, llama

ANATOMY = {  # name of the blocks and of the final norm in the user's model
    "gpt2": ("transformer.h", "transformer.ln_f"),
    "gpt-neox": ("gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "opt": ("model.decoder.layers", "model.decoder.final_layer_norm"),
}

# Families whose mask ignores position_ids too, which transformers does not say.
LEAKING = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: transformers.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4),
}


def taken_apart(family: str, **options: str) -> CausalLM:
    trainable = make_trainable(build(CONFIGS[family]()), **options)
    assert isinstance(trainable, CausalLM)
    return trainable


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_logits_are_those_of_the_model_itself_to_the_last_bit(family: str) -> None:
    whole = build(CONFIGS[family]()).eval()
    expected = whole(**inputs(batch()), use_cache=False).logits
    trainable = taken_apart(family).eval()
    assert torch.equal(trainable.logits(batch()), expected)
    captured = trainable.capture(batch())
    hidden = captured.hidden
    for index, block in enumerate(trainable.blocks):
        hidden = captured.run_block(index, block, hidden)
    assert torch.equal(trainable.tail.logits(hidden), expected)
    assert torch.equal(trainable.logits(batch()), expected), "capturing must leave no trace"


@pytest.mark.parametrize("family", CONFIGS)
def test_the_loss_and_every_gradient_are_those_of_transformers(family: str) -> None:
    whole, sample = build(CONFIGS[family]()).eval(), batch()
    logits = whole(**inputs(sample), use_cache=False).logits.flatten(0, 1)
    expected = nn.functional.cross_entropy(logits.float(), sample["targets"].flatten(), reduction="sum") / 23
    expected.backward()
    trainable = taken_apart(family).eval()
    trainable.tail.chunk_tokens = 5
    loss = trainable(sample, 23.0)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    references = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in trainable.named_canonical():
        reference = references.pop(name)
        if reference is None or reference.norm() < 1e-7:  # a key's bias has no effect: its gradient is rounding
            assert parameter.grad is None or parameter.grad.norm() < 1e-6
            continue
        assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm(), name
    assert references == {}, "each tensor of the model once"


@pytest.mark.parametrize("family", CONFIGS)
def test_the_parts_are_found(family: str) -> None:
    trainable = taken_apart(family)
    blocks, norm = ANATOMY.get(family, ("model.layers", "model.norm"))
    assert (trainable.anatomy.blocks, trainable.anatomy.tail) == (blocks, (norm,))
    assert len(trainable.blocks) == 4
    assert trainable.tied == (family in TIED)
    assert (trainable.embedding is None) == trainable.tied
    units = [*trainable.blocks, trainable.tail.norms, *filter(None, [trainable.embedding])]
    owners = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert len(owners) == len(set(owners)), "no parameter in two units"


@pytest.mark.parametrize("family", [*CONFIGS, *LEAKING])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other_or_are_refused(family: str) -> None:
    """https://github.com/huggingface/trl/issues/1230: with packing later documents attended to earlier ones.

    What is said of a model is compared with what it does.
    """
    trainable = make_trainable(build({**CONFIGS, **LEAKING}[family]())).eval()
    assert isinstance(trainable, CausalLM)
    sample = batch(rows=1)
    other = {**sample, "input_ids": sample["input_ids"].clone()}
    other["input_ids"][0, :5] = (sample["input_ids"][0, :5] + 7) % 60 + 3
    before, after = trainable.logits(sample), trainable.logits(other)
    assert not torch.equal(before[0, :5], after[0, :5])
    # An expert's matrix product takes the tokens of all documents at once: its rounding may differ.
    apart = torch.allclose(before[0, 5:], after[0, 5:], rtol=0, atol=1e-6 if family == "mixtral" else 0)
    assert trainable.separates_documents == apart == (family != "opt" and family not in LEAKING)
    if apart:
        refuse_packing(trainable)
        return
    with pytest.raises(UserError, match=rf"{trainable.architecture} does not keep .* data\.packing=false"):
        refuse_packing(trainable)


def test_rows_of_several_documents_are_told_from_padded_ones() -> None:
    positions, targets = torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[5, 6, -100, 7, -100]])
    assert holds_packed_documents({"position_ids": positions, "targets": targets})
    assert not holds_packed_documents({"position_ids": torch.arange(5)[None], "targets": targets})
    assert not holds_packed_documents({"targets": targets})
    padded = torch.tensor([[5, 6, -100, -100, -100]])
    assert not holds_packed_documents({"position_ids": positions, "targets": padded}), "padding counts for nothing"


def test_a_rule_for_the_logits_that_is_not_known_is_refused() -> None:
    config = llama()
    config.logit_bias = 0.5
    with pytest.raises(UserError, match="logit_bias"):
        output_transform(config)


def test_the_head_s_rules_are_read_from_the_config() -> None:
    assert output_transform(CONFIGS["llama"]()) == (1.0, None)
    assert output_transform(CONFIGS["gemma2"]()) == (1.0, 30.0)
    assert output_transform(CONFIGS["cohere"]()) == (0.0625, None)
    assert output_transform(CONFIGS["granite"]()) == (0.125, None)


def test_a_model_without_a_language_model_head_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(UserError, match=r"BertForSequenceClassification.*forward\(batch\)"):
        make_trainable(transformers.BertForSequenceClassification(config))


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    class Flat(nn.Module):
        config = llama()

        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(2, 2)

    with pytest.raises(UserError, match="Flat has no list of blocks"):
        make_trainable(Flat())


def test_any_other_module_brings_its_own_sum_and_count() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            return self.linear(values["x"]).square().sum(), len(values["x"])

    model = Squares()
    x = torch.randn(5, 3)
    trainable = make_trainable(model)
    assert isinstance(trainable, Summed)
    assert torch.equal(trainable({"x": x}, 4.0), model({"x": x})[0] / 4.0)
    assert dict(trainable.named_canonical()).keys() == {"linear.weight", "linear.bias"}
