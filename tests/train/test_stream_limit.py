"""Under a limit that the kernel holds: backend stream, where ddp is killed; and what is done with a model then."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.export.models import bpe_tokenizer
from tests.memory_limit import memory_limit, run_under
from tests.train.support import write_recipe

LIMIT_MIB = 800
LARGER_MIB = 600
# 62M parameters: 1 GB of weights, gradients and moments.
MODEL = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
         "num_hidden_layers": 7, "num_attention_heads": 12, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.slow
def test_ddp_is_killed_where_stream_is_not(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    recipe = write_recipe(
        tmp_path,
        model={"config": str(config)},
        data={"sequence_length": 128},
        train={"steps": 2},
        shard={"micro_batch": 2},
        checkpoint={"every": 1},
    )
    stream = ("--set=shard.backend=stream", f"--set=shard.memory_limit={LIMIT_MIB}MiB")
    with memory_limit(LIMIT_MIB) as group:
        ended = run_under(group, "train", recipe, "--output", tmp_path / "ddp", "--set=shard.backend=ddp")
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        ended = run_under(group, "train", recipe, "--output", tmp_path / "stream", *stream)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "stream" / "model" / "model.safetensors").exists()
    assert (tmp_path / "stream" / "checkpoints" / "step-00000002").exists()


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of 618 MiB, of which nothing is in the page cache."""
    directory = tmp_path_factory.mktemp("larger") / "model"
    tokenizer = bpe_tokenizer(300)
    config = AutoConfig.for_model(
        **MODEL
        | {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
        | {"num_hidden_layers": 10, "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id}
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory.parent / "held.txt").write_text("alpha beta gamma delta " * 40)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "eval", "export hf", "export gguf"])
def test_a_model_larger_than_the_limit_is_used(larger: Path, tmp_path: Path, command: str) -> None:
    """Weights are mapped or read one at a time; llama.cpp, which holds them, is not run where there is no room."""
    what, _, to = command.partition(" ")
    arguments = {
        "generate": [larger, "--prompt", "the quick", "--tokens", "3"],
        "eval": [larger, "--files", larger.parent / "held.txt", "--sequence-length", "64"],
        "export": [larger, tmp_path / "out.gguf", "--to", to],
    }[what]
    for file in larger.glob("*.safetensors"):  # pages that another process has read are not counted for this one
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = sum(file.stat().st_size for file in larger.glob("*.safetensors"))
    assert size > LARGER_MIB << 20
    with memory_limit(LARGER_MIB) as group:
        ended = run_under(group, what, *arguments, told=True)
    assert ended.returncode == 0, ended.stderr
    if to == "gguf":
        assert "not run by llama.cpp" in ended.stdout
