"""What was pruned stays zero in training, on every backend, through resume and resharding (field case B59).

https://github.com/jacobgil/pytorch-pruning/issues/41: only gradients were masked, and momentum moved the zeros.
"""

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardlab import Engine
from shardlab.checkpoint import CheckpointReader, find_newest
from shardlab.compress.sparsity import masks_by_magnitude
from shardlab.state.box import whole
from shardlab.state.masks import MASKS, Masks
from tests.distributed.pool import Pools
from tests.train.loop import Outcome, assert_agree, batch, by_hand, tiny_llama, two_groups
from tests.train.support import shardlab, write_recipe

STEPS = 6
TRAIN = {"steps": STEPS, "optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
NATURAL = "model.layers.0.mlp.up_proj.weight"  # has a zero that was not pruned


def halves(model: nn.Module) -> dict[str, Tensor]:
    """Half of each block's matrices by magnitude, of the last block's two in each four."""
    stays = {}
    for name, parameter in model.named_parameters():
        if "proj" in name:
            score = parameter.detach().abs()
            groups = score.reshape(-1, 4) if "layers.1" in name else score.reshape(1, -1)
            gone = groups.topk(groups.shape[1] // 2, largest=False).indices
            stays[name] = torch.ones_like(groups, dtype=torch.bool).scatter_(1, gone, False).reshape(score.shape)
    return stays


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of a pruned directory, whose weights are there all the same: the masks alone say what is zero."""
    model = tiny_llama()
    stays = halves(model)
    row, column = stays[NATURAL].nonzero()[0].tolist()
    with torch.no_grad():
        model.get_parameter(NATURAL)[row, column] = 0.0
    model.save_pretrained(tmp_path / "pruned")  # type: ignore[operator]
    (tmp_path / "pruned" / MASKS).write_bytes(Masks.of(stays).dump())
    section = {"path": str(tmp_path / "pruned")}
    return write_recipe(tmp_path, model=section, train=TRAIN, shard={"micro_batch": 1}, checkpoint={"every": 2})


def came_back(directory: Path, recipe: Path) -> int:
    """Non-zero weights of a saved directory where the first one's masks have zeros; it must have masks of its own."""
    first, masks = Masks.read(recipe.parent / "pruned"), Masks.read(directory)
    assert first.packed.keys() == masks.packed.keys()
    assert all(torch.equal(bits, masks.packed[name]) for name, bits in first.packed.items())
    weights = load_file(directory / "model.safetensors")
    return sum(int(weights[name][~masks.stays(name, tuple(weights[name].shape))].count_nonzero()) for name in masks)


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("ddp", "bf16"), ("fsdp", "fp32"), ("zero1", "bf16"), ("zero2", "fp32"), ("zero2", "bf16"), ("zero3", "bf16")],
)
def test_no_update_brings_a_weight_back_on_two_ranks(
    pools: Pools, recipe: Path, tmp_path: Path, backend: str, precision: str
) -> None:
    given = [f"shard.backend={backend}", f"train.precision={precision}"]
    outcomes = pools.run(
        2, "tests.train.jobs", "masked_steps", recipe=recipe, overrides=given, directory=tmp_path / "model"
    )
    for counts, losses in outcomes:
        assert counts == [0] * STEPS
        assert losses[-1] < losses[0]
    assert came_back(tmp_path / "model", recipe) == 0
    natural = load_file(tmp_path / "model" / "model.safetensors")[NATURAL]
    stays = Masks.read(tmp_path / "pruned").stays(NATURAL, tuple(natural.shape))
    assert bool((natural[stays] != 0).all()), "a zero that nobody pruned learns"


def test_no_update_brings_a_weight_back_from_the_disk(recipe: Path, tmp_path: Path) -> None:
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", "shard.backend=stream")
    assert ended.code == 0, ended.err
    assert "pruned weights stay zero" in ended.out
    assert came_back(tmp_path / "run" / "model", recipe) == 0


def test_masks_go_through_checkpoints_to_other_backends_and_ranks(pools: Pools, recipe: Path, tmp_path: Path) -> None:
    lives = [("zero3", 2), ("fsdp", 3), ("stream", 1)]
    for number, (backend, world) in enumerate(lives, start=1):
        stop = [f"train.stop_after={2 * number}"] if number < len(lives) else []
        micro = "shard.micro_batch=1"
        told = pools.run(
            world,
            "tests.train.jobs",
            "train_run",
            recipe=recipe,
            output=tmp_path / "run",
            overrides=[f"shard.backend={backend}", "train.global_batch_size=6", micro, *stop],
            world_size=world,
            resume="auto",
        )
        assert isinstance(told[0], dict), told
        newest = find_newest(tmp_path / "run")
        masks = Masks.read(newest)
        with CheckpointReader(newest) as reader:
            for name in Masks.read(tmp_path / "pruned"):
                shape = reader.shapes()[name]
                box = whole(shape)
                assert box is not None
                value = torch.empty(shape)
                reader.read_into(name, "master", box, value)
                assert not value[~masks.stays(name, shape)].any(), (backend, name)
    assert came_back(tmp_path / "run" / "model", recipe) == 0
    ended = shardlab("checkpoint", "export", find_newest(tmp_path / "run"), tmp_path / "exported")
    assert ended.code == 0, ended.err
    assert came_back(tmp_path / "exported", recipe) == 0


def test_the_recipe_can_let_them_grow_again(recipe: Path, tmp_path: Path) -> None:
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", "model.keep_masks=false")
    assert ended.code == 0, ended.err
    assert not (tmp_path / "run" / "model" / MASKS).exists()
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    stays = halves(tiny_llama())
    assert all(bool(weights[name][~mask].any()) for name, mask in stays.items())


def test_a_loop_of_one_s_own_is_the_same_loop_with_zeros_set_by_hand(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, train={"schedule": {"name": "constant", "warmup_steps": 0}}, shard={"micro_batch": 2}
    )
    model = tiny_llama()
    stays = halves(model)
    engine = Engine.from_recipe(recipe, output=tmp_path / "run")
    _, _, loader = engine.prepare(model, two_groups(model), [batch(index) for index in range(4)], masks=stays)
    losses = [engine.step(window) for window in loader]
    saved = engine.save_state()
    engine.save(tmp_path / "model")
    engine.close()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    result = Outcome(losses, {name: value.numpy() for name, value in weights.items()})
    assert_agree(result, by_hand([[0, 1], [2, 3]], stays))
    # A checkpoint brings its masks to a loop that does not give them.
    model = tiny_llama()
    engine = Engine.from_recipe(recipe, output=tmp_path / "run")
    _, _, loader = engine.prepare(model, two_groups(model), [batch(index) for index in range(6)])
    assert engine.load_state(saved) == 2
    assert [engine.step(window) is not None for window in loader] == [True]
    again = dict(engine.backend.tensors())
    assert not any(again[name][~mask].any() for name, mask in stays.items())
    engine.close()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_classifier_keeps_the_zeros_of_its_convolutions(scope: Literal["layer", "global"], tmp_path: Path) -> None:
    from recipes.digits import model as classifier
    from recipes.digits import rows

    module, (training, _) = classifier(), rows()
    stays = masks_by_magnitude(module, 0.5, scope=scope, ignore=["classes.2"])
    assert stays.keys() == {"features.0.weight", "features.2.weight", "classes.0.weight"}
    gone = {name: float((~mask).float().mean()) for name, mask in stays.items()}
    assert sum(int((~mask).sum()) for mask in stays.values()) == sum(mask.numel() for mask in stays.values()) // 2
    assert (set(gone.values()) == {0.5}) == (scope == "layer")
    recipe = write_recipe(tmp_path, train={"optimizer": {"lr": 1e-2}, "steps": 10}, shard={"micro_batch": 4})
    engine = Engine.from_recipe(recipe)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches = [training.batch(range(4 * step, 4 * step + 4)) for step in range(10)]
    _, _, loader = engine.prepare(module, optimizer, batches, masks=stays)
    losses = [engine.step(window) for window in loader]
    assert losses[-1] != losses[0]
    engine.save(tmp_path / "model")
    engine.close()
    weights, saved = load_file(tmp_path / "model" / "model.safetensors"), Masks.read(tmp_path / "model")
    for name, mask in stays.items():
        assert torch.equal(saved.stays(name, tuple(mask.shape)), mask)
        assert not weights[name][~mask].any()
        assert bool((weights[name][mask] != 0).all())


def test_masks_of_another_model_and_damaged_weights(recipe: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "pruned", tmp_path / "wrong")
    save_file({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, dtype=torch.uint8)}, tmp_path / "wrong" / MASKS)
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", f"model.path={tmp_path / 'wrong'}")
    assert "another model: it has no tensor model.layers.9" in ended.error
