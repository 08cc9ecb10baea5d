"""Values put into a module: each tied tensor once, and nothing held that the module has given away."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.backends.materialize import Materializer
from shardlab.model.deferred import Weights, build_deferred
from shardlab.model.trainable import Trainable, make_trainable
from tests.train.support import TINY


def built(*, tied: bool) -> tuple[Trainable, Weights]:
    config = AutoConfig.for_model(**TINY, tie_word_embeddings=tied)
    model, weights = build_deferred(lambda: AutoModelForCausalLM.from_config(config), seed=0)
    return make_trainable(model), weights


def test_what_a_backend_has_sharded_is_not_held() -> None:
    """It was, until all units were made: each rank had the whole model in fp32 beside its shards."""
    module, weights = built(tied=False)
    materializer = Materializer(module, weights, torch.device("cpu"))
    block = module.blocks[0]
    materializer.materialize(block)
    whole = [weakref.ref(parameter) for parameter in block.parameters()]
    for child in block.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.detach()[:1].clone())
    del parameter, child
    gc.collect()
    assert [one() for one in whole] == [None] * len(whole)


@pytest.mark.parametrize("frozen", [None, torch.bfloat16])
def test_a_tied_tensor_is_made_once_and_frozen_ones_in_their_own_type(frozen: torch.dtype | None) -> None:
    module, weights = built(tied=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    materializer = Materializer(module, weights, torch.device("cpu"), frozen=frozen)
    for unit in [*module.blocks, module.tail, module]:
        assert unit is not None
        materializer.materialize(unit)
    assert module.tail is not None
    assert module.table is not None
    assert module.tail.head.weight is module.table.weight
    for parameter in module.parameters():
        wanted = torch.float32 if parameter.requires_grad else frozen or torch.float32
        assert parameter.dtype == wanted
