"""Two models on the same held-out text: what one has lost of the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.compress.quality import Comparison, Quality
from shardlab.data import evaluation_batches, prepare_data
from shardlab.data.tokenizer import refuse_other_tokens
from shardlab.data.window import IGNORED, MicroBatch
from shardlab.errors import UserError
from shardlab.recipe import DataSection
from shardlab.topology import Topology

Logits = Callable[[MicroBatch], Tensor]
"""Of each token of a batch, in order, documents apart: (tokens, vocabulary) in fp32."""


def compare(original: Path, changed: Path, data: DataSection, *, rows: int | None = None) -> Quality:
    """`changed` beside `original`, both as transformers runs them in fp32, on `data`'s evaluation split.

    Of that the first `rows`, or all. Raises UserError where nothing is held out, or their tokens are not the same.
    """
    refuse_other_tokenizers(original, changed)
    return compare_logits(transformers_logits(original), transformers_logits(changed), data, rows=rows)


def compare_logits(first: Logits, second: Logits, data: DataSection, *, rows: int | None = None) -> Quality:
    """The second of two models beside the first, on the first `rows` rows that are held out, or all.

    Heads that were padded otherwise are compared on the tokenizer's entries. Raises UserError where nothing is held
    out, or a head has fewer.
    """
    prepared = prepare_data(data)
    if prepared.evaluation is None:
        raise UserError("nothing is held out: give --files, or more text")
    entries = len(prepared.tokenizer)
    comparison = Comparison()
    with torch.no_grad():
        for batch in evaluation_batches(prepared.evaluation, micro_batch=1, rank=0, world_size=1, limit=rows):
            before, after = first(batch), second(batch)
            if before.shape != after.shape:
                fewer = min(before.shape[1], after.shape[1])
                if fewer < entries:
                    raise UserError(f"the tokenizer has {entries} entries, and one of the models scores {fewer}")
                before, after = before[:, :entries], after[:, :entries]
            targets = batch.tensors["targets"].flatten().to(before.device)
            counted = targets != IGNORED
            comparison.add(before[counted], after.to(before.device)[counted], targets[counted])
    return comparison.quality()


def transformers_logits(directory: Path) -> Logits:
    """Of the model in `directory`, whatever its weights are stored in."""
    from transformers import AutoModelForCausalLM

    device = torch.device(Topology.detect().device)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()

    def logits(batch: MicroBatch) -> Tensor:
        inputs = {name: tensor.to(device) for name, tensor in batch.tensors.items() if name != "targets"}
        found: Tensor = model(**inputs, use_cache=False).logits
        return found.flatten(0, 1)

    return logits


def refuse_other_tokenizers(original: Path, changed: Path) -> None:
    """Raises UserError where those in two directories don't make the same ids of a text."""
    from transformers import AutoTokenizer

    first, second = (AutoTokenizer.from_pretrained(path) for path in (original, changed))
    refuse_other_tokens(first, second, f"{original}", f"{changed}")
