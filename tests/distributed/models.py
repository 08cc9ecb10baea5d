"""Models small enough for a job of a fraction of a second, with sizes that no number of ranks divides."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

VOCABULARY = 65
WIDTH = 32


def llama(dropout: float, *, tied: bool = False) -> nn.Module:
    """5 rows of MLP weights and 65 of vocabulary: neither divides by 2 or 4 ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def tied_llama(dropout: float) -> nn.Module:
    """The head is the embedding."""
    return llama(dropout, tied=True)


def gpt2(dropout: float) -> nn.Module:
    """Learned positions, biases, layer norms, dropout in the embedding and in both branches, a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=64,
        n_inner=5,
        bos_token_id=None,
        eos_token_id=None,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


class Custom(nn.Module):
    """A user's own class: no config, no embedding getter, its own summed loss and count."""

    def __init__(self, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, WIDTH))
        self.scores = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = self.scores(self.inner(self.tokens(batch["input_ids"])))
        targets = batch["targets"]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss, (targets >= 0).sum()


class SummedLinear(nn.Module):
    """The fixture LIN of the field cases: one bias-free Linear(4, 1) of ones, whose output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        valid = batch["targets"] >= 0
        losses = self.linear(batch["inputs"]).squeeze(1) + batch["offsets"]
        return torch.where(valid, losses, 0.0).sum(), valid.sum()


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "llama": llama,
    "tied llama": tied_llama,
    "gpt2": gpt2,
    "custom": Custom,
}
