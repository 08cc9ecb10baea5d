"""A trained model's loss on held-out text, and what it writes."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shardlab.backends.base import sum_losses
from shardlab.backends.materialize import Materializer, move_buffers
from shardlab.data import evaluation_batches, prepare_data
from shardlab.data.window import IGNORED, MicroBatch
from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.model.trainable import make_trainable, refuse_packing
from shardlab.recipe import DataSection, ModelSection
from shardlab.topology import Topology


def evaluate_directory(
    directory: Path, data: DataSection, *, micro_batch: int = 8, rows: int | None = None
) -> dict[str, Any]:
    """Mean loss per token of the model in `directory` on `data`'s evaluation split, and its perplexity.

    The text is split as in training with the same `data`; `rows` takes the first ones only. Raises UserError if nothing
    is held out.
    """
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{directory} holds adapters only; `shardlab merge {directory} OUT` makes a model of them")
    topology = Topology.detect()
    prepared = prepare_data(data)
    if prepared.evaluation is None:
        raise UserError("nothing is held out: set data.evaluation_fraction above 0 or give data.evaluation_files")
    batches = evaluation_batches(prepared.evaluation, micro_batch=micro_batch, rank=0, world_size=1, limit=rows)
    if _is_quantized(directory):
        return figures(*_by_transformers(directory, batches, torch.device(topology.device)))
    model, weights = build_model(
        ModelSection(path=str(directory)),
        vocabulary=len(prepared.tokenizer),
        eos_token_id=prepared.tokenizer.eos_token_id,
        sequence_length=data.sequence_length,
        seed=0,
    )
    module = make_trainable(model)
    if data.packing:
        refuse_packing(module)
    device = torch.device(topology.device)
    Materializer(module, weights, device).materialize(module)
    move_buffers(module, device)
    return figures(*sum_losses(module, module, batches, topology))


def figures(loss_sum: float, tokens: int) -> dict[str, Any]:
    """What an evaluation says: mean loss in nats for a token, perplexity, tokens."""
    loss = loss_sum / tokens
    return {"loss": loss, "perplexity": math.exp(loss), "tokens": tokens}


def _is_quantized(directory: Path) -> bool:
    try:
        return "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # who builds the model says what is wrong


def _by_transformers(directory: Path, batches: Iterable[MicroBatch], device: torch.device) -> tuple[float, int]:
    """(sum of losses, tokens): the model as transformers runs it, inputs rounded too where the scheme says so."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            moved = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
            targets = moved.pop("targets").flatten()
            logits = model(**moved, use_cache=False).logits.flatten(0, 1)
            counted = targets != IGNORED
            total += torch.nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum").item()
            tokens += int(counted.sum())
    return total, tokens


def generate(directory: Path, prompt: str, *, new_tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """`prompt` and what the model in `directory` writes after it: the likeliest tokens, or sampled ones.

    Raises UserError if `directory` is not a model directory with a tokenizer, or the prompt encodes to nothing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise UserError("the prompt is empty: give at least one character with --prompt")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    output = model.generate(**inputs, max_new_tokens=new_tokens, pad_token_id=tokenizer.eos_token_id, **sampling)
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text
