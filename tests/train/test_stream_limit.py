"""Backend stream under a limit that the kernel holds, which ends ddp on the same recipe."""

import json
import signal
from pathlib import Path

import pytest

from tests.memory_limit import memory_limit, run_under
from tests.train.support import write_recipe

LIMIT_MIB = 800
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
