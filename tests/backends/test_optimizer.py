import pytest
import torch
from torch import nn

from shardlab.backends.base import scale_for_clipping
from shardlab.backends.optimizer import build_optimizer, like, set_learning_rate
from shardlab.errors import UserError
from shardlab.recipe import SGD, AdamW, ParameterGroup


def model() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 2)})


def members(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["names"] for group in optimizer.param_groups]


def test_the_first_group_that_matches_a_name_holds() -> None:
    groups = (ParameterGroup(pattern="*.bias", weight_decay=0.0), ParameterGroup(pattern="first.*", lr=0.5))
    optimizer = build_optimizer(AdamW(lr=1.0, weight_decay=0.1, groups=groups), model().named_parameters())
    assert members(optimizer) == [["first.bias", "second.bias"], ["first.weight"], ["second.weight"]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.1]
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1, 0.2]


@pytest.mark.parametrize("pattern", ["third.*", "first.weight"])
def test_a_group_without_a_tensor_is_refused(pattern: str) -> None:
    groups = (ParameterGroup(pattern="first.*"), ParameterGroup(pattern=pattern))
    with pytest.raises(UserError, match=pattern.replace("*", r"\*")):
        build_optimizer(SGD(name="sgd", groups=groups), model().named_parameters())


def test_every_option_reaches_torch() -> None:
    adamw = build_optimizer(AdamW(lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2), model().named_parameters())
    assert isinstance(adamw, torch.optim.AdamW)
    group = adamw.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.2)
    sgd = build_optimizer(SGD(name="sgd", momentum=0.7, weight_decay=0.3), model().named_parameters())
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["weight_decay"]) == (0.7, 0.3)


def test_a_users_optimizer_is_made_again_over_the_sharded_tensors_by_name() -> None:
    """https://github.com/huggingface/accelerate/issues/2665: groups were lost, or held stale tensors."""
    theirs = model()
    groups = [
        {"params": list(theirs["first"].parameters()), "lr": 0.1, "weight_decay": 0.0},
        {"params": list(theirs["second"].parameters())},
    ]
    factory = like(torch.optim.Adam(groups, lr=0.4, betas=(0.5, 0.6)), theirs)
    sharded = model()
    optimizer = factory(list(sharded.named_parameters()))
    assert isinstance(optimizer, torch.optim.Adam)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, sharded.parameters()))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.6)] * 2
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.05), 0.2]


def test_a_users_optimizer_that_misses_a_tensor_is_refused() -> None:
    """https://github.com/huggingface/accelerate/issues/3209: what it does not hold would silently stay as it is."""
    theirs = model()
    optimizer = torch.optim.SGD(theirs["first"].parameters(), lr=1.0)
    with pytest.raises(UserError, match=r"2 trainable tensors.*second\.bias"):
        like(optimizer, theirs)
    theirs["second"].requires_grad_(False)
    like(optimizer, theirs)


@pytest.mark.parametrize(("norm", "limit", "scale"), [(200.0, 1.0, 1 / 200), (0.5, 1.0, None), (200.0, None, None)])
def test_clipping_scales_as_torch_does(norm: float, limit: float | None, scale: float | None) -> None:
    assert scale_for_clipping(norm, limit) == (None if scale is None else pytest.approx(scale, rel=1e-6))
