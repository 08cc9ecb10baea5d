"""Perplexity is one number: whatever the batch size, the padding side, the packing, the ranks and the backend.

https://github.com/huggingface/transformers/issues/37766. The reference is transformers' loss of each document alone.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shardlab.recipe import load_recipe
from shardlab.train.evaluate import evaluate_directory
from tests.data.chat_tokenizer import save_tokenizer
from tests.distributed.pool import Pools
from tests.train.jobs import Array, perplexities
from tests.train.support import TINY, write_recipe

LENGTH = 48


@dataclass(frozen=True)
class Held:
    """A model directory, held-out documents (ids, labels), and the reference: mean loss and tokens."""

    directory: Path
    recipe: Path
    tokenizer: PreTrainedTokenizerFast
    documents: list[tuple[list[int], list[int]]]
    loss: float
    tokens: int


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """Thirteen pairs of unlike lengths, prompts not counted, and a model with opinions."""
    place = tmp_path_factory.mktemp("held")
    directory = place / "model"
    tokenizer = save_tokenizer(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**TINY, "vocab_size": len(tokenizer), "initializer_range": 0.3})
        model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    draw = np.random.default_rng(0)
    words = ["two ", "plus ", "four ", "Hello ", "yes ", "no "]
    pairs = [["".join(draw.choice(words, size=draw.integers(1, 12))) for _ in range(2)] for _ in range(13)]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    (place / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = [str(place / "pairs.jsonl")]
    recipe = write_recipe(
        place,
        model={"path": str(directory)},
        data={
            "files": files,
            "evaluation_files": files,
            "evaluation_fraction": 0.0,
            "format": "instruct",
            "tokenizer": str(directory),
            "sequence_length": LENGTH,
        },
    )
    documents, total, tokens = [], 0.0, 0
    for prompt, completion in pairs:
        asked = tokenizer(prompt)["input_ids"]
        ids = [*asked, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(asked) + ids[len(asked) :]
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        count = len(ids) - len(asked)
        documents.append((ids, labels))
        total += float(loss) * count
        tokens += count
    return Held(directory, recipe, tokenizer, documents, total / tokens, tokens)


def padded(held: Held, size: int, side: str) -> list[dict[str, Array]]:
    """The documents in batches of `size`, as transformers' tokenizer pads them; the pad token is the end token."""
    held.tokenizer.pad_token = held.tokenizer.eos_token
    held.tokenizer.padding_side = side
    batches = []
    for start in range(0, len(held.documents), size):
        part = held.documents[start : start + size]
        whole = held.tokenizer.pad({"input_ids": [ids for ids, _ in part]}, return_tensors="np")
        width = whole["input_ids"].shape[1]
        labels = [
            [-100] * (width - len(row)) + row if side == "left" else row + [-100] * (width - len(row))
            for _, row in part
        ]
        mask = whole["attention_mask"]
        batches.append({"input_ids": whole["input_ids"], "attention_mask": mask, "labels": np.array(labels)})
    return batches


CASES = [(size, side) for size in (1, 4, 13) for side in ("left", "right")]


@pytest.mark.parametrize(("size", "side"), CASES)
def test_on_one_process(held: Held, size: int, side: str) -> None:
    for loss, tokens in perplexities(held.recipe, "ddp", padded(held, size, side)):
        assert tokens == held.tokens
        assert loss == pytest.approx(held.loss, rel=1e-5)


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero1", "zero3"])
def test_on_two_ranks_with_unlike_numbers_of_batches(held: Held, pools: Pools, backend: str) -> None:
    """The second rank has one batch fewer of the user's own, and the rows come out even on neither."""
    batches = padded(held, 5, "left")
    assert len(batches) == 3
    options = {"recipe": held.recipe, "backend": backend, "batches": batches}
    for results in pools.run(2, "tests.train.jobs", "perplexities", **options):
        for loss, tokens in results:
            assert tokens == held.tokens
            assert loss == pytest.approx(held.loss, rel=1e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_of_a_directory(held: Held, micro_batch: int, packing: bool) -> None:
    data = load_recipe(held.recipe, [f"data.packing={json.dumps(packing)}"]).data
    result = evaluate_directory(held.directory, data, micro_batch=micro_batch)
    assert result["tokens"] == held.tokens
    assert result["perplexity"] == pytest.approx(math.exp(held.loss), rel=1e-5)


def test_an_average_of_averages_would_be_seen(held: Held) -> None:
    """The comparison above is worth something: means over batches of unlike token counts give another number."""
    model = AutoModelForCausalLM.from_pretrained(held.directory).eval()
    with torch.no_grad():
        means = [
            float(model(**{key: torch.tensor(value) for key, value in batch.items()}).loss)
            for batch in padded(held, 4, "right")
        ]
    assert abs(sum(means) / len(means) - held.loss) > 1e-3 * held.loss
