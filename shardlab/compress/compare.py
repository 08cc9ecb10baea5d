"""Two model directories on the same held-out text: what one has lost of the other."""

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


def compare(original: Path, changed: Path, data: DataSection, *, limit: int | None = None) -> Quality:
    """`changed` beside `original`, both as transformers runs them in fp32, on `data`'s evaluation split.

    Of that the first `limit` rows, or all. Heads that were padded otherwise are compared on the tokenizer's entries.

    Raises UserError where nothing is held out, or their tokens are not the same.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepared = prepare_data(data)
    if prepared.evaluation is None:
        raise UserError("nothing is held out: give --files, or more text")
    first, second = (AutoTokenizer.from_pretrained(path) for path in (original, changed))
    refuse_other_tokens(first, second, f"{original}", f"{changed}")
    device = torch.device(Topology.detect().device)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        for path in (original, changed)
    ]
    comparison = Comparison()
    with torch.no_grad():
        for batch in evaluation_batches(prepared.evaluation, micro_batch=1, rank=0, world_size=1, limit=limit):
            before, after = (_logits(model, batch, device) for model in models)
            if before.shape != after.shape:
                before, after = before[:, : len(first)], after[:, : len(first)]
            targets = batch.tensors["targets"].flatten().to(device)
            counted = targets != IGNORED
            comparison.add(before[counted], after[counted], targets[counted])
    return comparison.quality()


def _logits(model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
    inputs = {name: tensor.to(device) for name, tensor in batch.tensors.items() if name != "targets"}
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.flatten(0, 1)
