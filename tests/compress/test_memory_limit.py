"""A model of a billion parameters, which takes 4 GB in fp32, pruned and quantized under 2 GiB that the kernel holds."""

import json
from pathlib import Path

import pytest
import torch

from shardlab.compress.card import read_card
from shardlab.data.tokenizer import make_tokenizer
from shardlab.model.build import build_shell
from shardlab.recipe import ModelSection
from shardlab.train.artifact import write_tensors
from tests.memory_limit import memory_limit, run_under

LIMIT_MIB = 2048
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5504, "num_hidden_layers": 22, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def write_model(directory: Path) -> int:
    """Random weights, a tensor at a time, and a tokenizer of bytes; parameters."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer("bytes", None, Path()).save_pretrained(directory)  # type: ignore[arg-type]
    shell = build_shell(ModelSection(path=str(directory)), vocabulary=0, sequence_length=1)
    shapes = {name: parameter.shape for name, parameter in shell.named_parameters()}
    draw = torch.Generator().manual_seed(0)

    def value(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=draw)

    write_tensors(directory, ((name, value(shape)) for name, shape in shapes.items()), 256 << 20)
    return sum(shape.numel() for shape in shapes.values())


@pytest.mark.soak
@pytest.mark.timeout(3600)  # a quarter of an hour on one quiet core
def test_a_billion_parameters_in_two_gibibytes(tmp_path: Path) -> None:
    parameters = write_model(tmp_path / "model")
    assert parameters > 1e9
    assert 4 * parameters > 1.8 * (LIMIT_MIB << 20)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number}: " + "a line of it\n" * 40)
    rows = [
        "--files",
        str(tmp_path / "texts/*.txt"),
        "--calibration",
        "8",
        "--held-out",
        "4",
        "--sequence-length",
        "64",
    ]
    with memory_limit(LIMIT_MIB) as group:
        narrow = ("--method", "channels", "--sparsity", "0.25")
        done = run_under(group, "prune", tmp_path / "model", tmp_path / "narrow", *narrow, *rows)
        assert done.returncode == 0, done.stderr
        done = run_under(group, "quantize", tmp_path / "narrow", tmp_path / "small", "--scheme", "int4g32", *rows)
        assert done.returncode == 0, done.stderr
    card = read_card(tmp_path / "small")
    assert card is not None
    size = card["figures"]["weight_bytes"]
    assert size["after"] < 0.4 * size["before"]
    assert [stage["stage"] for stage in card["lineage"]] == ["prune"]
    assert card["figures"]["perplexity"]["after"] > 0
