"""What a resume takes of a rank's memory beside the state that stays, and what it reads."""

import json
from pathlib import Path

import pytest

from shardlab.checkpoint.load import BUFFER_BYTES
from tests.distributed.pool import Pools
from tests.train.support import write_recipe

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LARGEST_BYTES = 4 * 512 * 4096
STATE_BYTES = 3 * 4 * (3 * (3 * 512 * 4096 + 4 * 512 * 512 + 2 * 512) + 257 * 512 + 512)
WORLD = 2


@pytest.fixture(scope="module")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, run) of a model of 85 MiB, 255 MiB with its moments, saved by FSDP after one step."""
    directory = tmp_path_factory.mktemp("saved")
    (directory / "config.json").write_text(json.dumps(MODEL))
    recipe = write_recipe(
        directory, model={"config": str(directory / "config.json")}, train={"steps": 2, "global_batch_size": 2}
    )
    given = {"recipe": recipe, "output": directory / "run", "overrides": ["shard.backend=fsdp", "train.stop_after=1"]}
    told = pools.run(WORLD, "tests.train.jobs", "train_run", **given)
    assert isinstance(told[0], dict), told
    return recipe, directory / "run"


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_rank_grows_by_its_own_state_and_little_more(pools: Pools, saved: tuple[Path, Path], backend: str) -> None:
    """Far below what is allowed, two of the largest tensors and 150 MB: no copy of the model, nor of the share."""
    recipe, run = saved
    ranks = pools.run(WORLD, "tests.train.jobs", "restored", recipe=recipe, backend=backend, run=run)
    for rank in ranks:
        assert rank.grown - rank.moments < 2 * LARGEST_BYTES + 3 * BUFFER_BYTES, vars(rank)
        assert rank.read <= STATE_BYTES
    held = sum(rank.moments for rank in ranks)
    assert held == pytest.approx(STATE_BYTES * 2 / 3 * (WORLD if backend == "ddp" else 1), rel=1e-3)
    if backend in ("zero3", "fsdp"):  # on one host the others read the weights whole as well
        assert sum(rank.read for rank in ranks) == pytest.approx(STATE_BYTES, rel=1e-3)
