"""A user's own model, optimizer, batches and loop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardlab import Engine
from shardlab.errors import UserError
from tests.distributed.pool import Pools
from tests.train.loop import assert_agree, batch, by_hand, through_engine, tiny_llama, two_groups
from tests.train.support import write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Four sequences in a step: two of a user's batches, on one rank or two."""
    schedule = {"name": "constant", "warmup_steps": 0}
    return write_recipe(tmp_path, train={"schedule": schedule}, shard={"micro_batch": 2})


def test_it_learns_what_the_same_loop_in_plain_torch_learns(recipe: Path, tmp_path: Path) -> None:
    """Token-weighted over the window, clipped, two parameter groups, and a last window of one batch."""
    engine = Engine.from_recipe(recipe)
    result = through_engine(engine, [0, 1, 2, 3, 4], tmp_path / "model")
    assert_agree(result, by_hand([[0, 1], [2, 3], [4]]))


def test_the_optimizer_that_comes_back_has_the_given_one_s_groups(recipe: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/3209: groups must survive wrapping. The given one is emptied."""
    model = tiny_llama()
    given = two_groups(model)
    counts = [len(group["params"]) for group in given.param_groups]
    engine = Engine.from_recipe(recipe)
    _, optimizer, loader = engine.prepare(model, given, [batch(0)])
    assert given.param_groups == []
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [len(group["params"]) for group in optimizer.param_groups] == counts
    for window in loader:
        engine.step(window)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.1), (3e-4, 0.0)]


def test_an_optimizer_that_misses_a_parameter_is_refused(recipe: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/2665: what it does not hold was not trained, without a word."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "layers.1" not in name], lr=1e-3)
    with pytest.raises(UserError, match=r"does not hold 9 trainable tensors .* model\.layers\.1\.input_layernorm"):
        Engine.from_recipe(recipe).prepare(model, optimizer, [batch(0)])


def test_an_optimizer_of_another_model_is_refused(recipe: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/149205: built before the model was made anew, it held stale tensors."""
    with pytest.raises(UserError, match="does not hold 21 trainable tensors"):
        Engine.from_recipe(recipe).prepare(tiny_llama(), two_groups(tiny_llama()), [batch(0)])


def test_frozen_tensors_need_no_optimizer(recipe: Path) -> None:
    model = tiny_llama()
    model.get_submodule("model.embed_tokens").requires_grad_(False)
    before = model.get_parameter("model.embed_tokens.weight").clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = Engine.from_recipe(recipe)
    trained, _, loader = engine.prepare(model, optimizer, [batch(0), batch(1)])
    for window in loader:
        engine.step(window)
    after = dict(trained.named_canonical())
    assert torch.equal(after["model.embed_tokens.weight"], before)
    assert not torch.equal(after["lm_head.weight"], tiny_llama().get_parameter("lm_head.weight"))


def test_a_window_without_a_target_has_no_loss_and_changes_nothing(recipe: Path) -> None:
    """https://github.com/huggingface/trl/issues/6668: a mean of nothing was NaN, or was logged as 0.0 and "success"."""
    model = tiny_llama()
    masked = {**batch(0), "labels": torch.full_like(batch(0)["labels"], -100)}
    engine = Engine.from_recipe(recipe)
    batches = [batch(0), batch(1), masked, masked, batch(2), batch(3)]
    trained, _, loader = engine.prepare(model, two_groups(model), batches)
    first = engine.run(next(loader))
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    nothing = engine.run(next(loader))
    assert (nothing.loss, nothing.grad_norm, nothing.tokens, nothing.skipped) == (None, None, 0, True)
    for parameter, value in zip(trained.parameters(), before, strict=True):
        assert torch.equal(parameter, value), "not even decayed"
    last = engine.run(next(loader))
    assert (engine.applied, engine.nonfinite_steps) == (2, 0)
    expected = by_hand([[0, 1], [2, 3]])
    np.testing.assert_allclose([first.loss, last.loss], expected.losses, rtol=1e-5)


def test_batches_without_labels_are_refused(recipe: Path) -> None:
    model = tiny_llama()
    engine = Engine.from_recipe(recipe)
    _, _, loader = engine.prepare(model, two_groups(model), [{"input_ids": batch(0)["input_ids"]}])
    with pytest.raises(UserError, match="'labels' or 'targets'"):
        next(loader)


def test_a_first_step_that_moves_nothing_stops_the_loop(recipe: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/3256: the loss stayed flat, and there was no error."""
    model = tiny_llama()
    engine = Engine.from_recipe(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    _, _, loader = engine.prepare(model, optimizer, [batch(0), batch(1)])
    with pytest.raises(RuntimeError, match=r"did not change \d+ of the trainable tensors"):
        engine.step(next(loader))


def test_a_user_s_own_accelerator_is_taken(recipe: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    engine = Engine.from_recipe(recipe, accelerator=Accelerator(cpu=True))
    assert_agree(through_engine(engine, [0, 1], tmp_path / "model"), by_hand([[0, 1]]))


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_two_ranks_with_unlike_numbers_of_batches(pools: Pools, recipe: Path, tmp_path: Path, backend: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/2223: the rank with more batches waited for ever.

    The first rank has three batches, the second two; each counts once, and both ranks go on to save.
    """
    shares = [[0, 2, 4], [1, 3]]
    outcomes = pools.run(
        2, "tests.train.jobs", "user_loop", recipe=recipe, backend=backend, shares=shares, directory=tmp_path / "model"
    )
    for outcome in outcomes:
        assert_agree(outcome, by_hand([[0, 1], [2, 3], [4]]))


def test_a_module_of_a_user_s_own_class_is_taken(recipe: Path, tmp_path: Path) -> None:
    """Its loss is its own; a batch goes to it as it is, labels as targets."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            error = self.inner(batch["x"]).squeeze(1) - batch["targets"]
            return error.square().sum(), torch.tensor(len(error))

    model = Line()
    x = torch.linspace(-1, 1, 8)[:, None]
    batches = [{"x": x, "targets": (3 * x.squeeze(1) + 1).round().long().abs()} for _ in range(20)]
    engine = Engine.from_recipe(recipe)
    _, _, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    losses = [engine.step(window) for window in loader]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    engine.save(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["model.safetensors"]
