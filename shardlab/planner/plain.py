"""The model as other people's loops run it: whole, with its own loss on whole logits, and nothing of ours around it.

What such a loop is taken to be: `outputs = model(input_ids=…, labels=…)`, whose loss is the model's own, so the logits
exist whole, again in fp32, and as their gradient; `outputs` stays until the next micro-batch's has come, and with it
logits and keys and values; torch's AdamW as it comes. In bf16 the loop casts by autocast ("hf"), or the weights
themselves are bf16 ("hf-bf16"); DeepSpeed and FSDP2 compute on bf16 weights either way.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.model.segments import dissect, output_embeddings
from shardlab.model.trainable import Trainable, tied_names
from shardlab.plan import Loop, Plan, Precision, Recompute


class PlainLoop(Trainable):
    """A causal language model of transformers, for a trace only: it keeps what its last forward pass returned."""

    def __init__(self, model: nn.Module):
        """Raises UserError for a module of another kind."""
        super().__init__()
        if not hasattr(model, "get_output_embeddings"):
            raise UserError("--loop hf is for a causal language model of transformers, with a loss of its own")
        anatomy = dissect(model)
        self.model = model
        self.tail = None
        self.blocks = list(model.get_submodule(anatomy.blocks).children())
        head = self.last
        self._tied = self.tied = any(p is head.weight for p in getattr(model, anatomy.body).parameters())
        self.canonical = {name: name.removeprefix("model.") for name, _ in self.named_parameters()}
        self.kept_buffers = {}
        self.autocast = False
        self._recompute: Recompute = "none"
        self.output: Any = None
        self._finish(model, tied_names(model), 0, "none")

    @property
    def last(self) -> nn.Linear:
        """See `Trainable.last`."""
        head = output_embeddings(self.model)
        assert isinstance(head, nn.Linear)
        return head

    @property
    def embedding(self) -> nn.Module | None:
        """See `Trainable.embedding`."""
        model: Any = self.model
        return None if self.tied else model.get_input_embeddings()

    def units_are_blocks(self, *, only: bool) -> None:
        """Whether the embedding and the head are gathered and reduced with the root, as Accelerate wraps for FSDP2."""
        self.tied = only or self._tied

    def set_recompute(self, recompute: Recompute, count: int | None = None) -> None:
        """See `Trainable.set_recompute`; transformers keeps no keys and values then."""
        super().set_recompute(recompute, count)
        self._recompute = recompute

    def forward(self, batch: Mapping[str, Tensor], denominator: float) -> Tensor:
        """The model's own mean loss; `batch` has input_ids and labels."""
        del denominator
        without_cache = {} if self._recompute == "none" else {"use_cache": False}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.model(**batch, **without_cache)
        if self.autocast:
            output.logits = output.logits.float()  # as Accelerate hands it out
        self.output = output
        loss: Tensor = output.loss
        return loss


def plain_batch(micro_batch: int, sequence_length: int) -> dict[str, Tensor]:
    """Shapes of what a collator gives: no padding, and no word of documents."""
    tokens = torch.zeros(micro_batch, sequence_length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def casts(plan: Plan, loop: Loop) -> bool:
    """Whether the weights are fp32 and autocast casts them."""
    return loop == "hf" and plan.precision == "bf16" and plan.backend == "ddp"


def weights_precision(plan: Plan, loop: Loop) -> Precision:
    """Of the weights that compute."""
    return "fp32" if casts(plan, loop) else plan.precision
