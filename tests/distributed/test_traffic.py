"""What a plan says that a backend sends, against what the dispatcher sees it send, on two ranks."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from shardlab.backends import traffic
from shardlab.backends.placement import Setting
from shardlab.model.shape import model_shape
from shardlab.model.trainable import make_trainable
from shardlab.plan import Plan
from tests.distributed.jobs import Case
from tests.distributed.models import MODELS
from tests.distributed.pool import Pools

SMALL = 200  # bytes: the loss, the norms


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "fsdp", "zero3"])
def test_a_window_sends_what_the_plan_says(pools: Pools, backend: Any, precision: Any) -> None:
    case = Case(backend=backend, optimizer="adamw", lr=1e-2, micro=2, precision=precision, shared_memory=False)
    (seen, micro_batches, world), *_ = pools.run(2, "tests.distributed.traffic_jobs", "collectives", case=case)
    measured, calls = Counter[str](), Counter[str]()
    for kind, size in seen:
        if size > SMALL:
            measured[kind] += size
            calls[kind] += 1
    plan = Plan(backend, world, 2, micro_batches, 2 * micro_batches * world, precision, shared_memory=False)
    with mock.patch.object(traffic, "PERSISTENCE_THRESHOLD", 0):  # as in the job
        found = traffic.exchanges(Setting(model_shape(make_trainable(MODELS["llama"](0.0))), plan, 2, ()))
    predicted, said = Counter[str](), Counter[str]()
    for exchange in found:
        predicted[exchange.collective] += exchange.size
        said[exchange.collective] += exchange.calls
    assert set(predicted) == set(measured)
    for kind in predicted:
        tolerance = 0.15 if backend == "zero3" and kind == "all-gather" else 1e-3
        assert predicted[kind] == pytest.approx(measured[kind], rel=tolerance), kind
        if backend in ("ddp", "fsdp"):
            assert said[kind] == calls[kind]


def test_ranks_that_share_memory_send_nothing_but_a_few_numbers(pools: Pools) -> None:
    case = Case(backend="fsdp", optimizer="adamw", lr=1e-2, micro=2)
    (seen, _, _), *_ = pools.run(2, "tests.distributed.traffic_jobs", "collectives", case=case)
    assert max(size for _, size in seen) <= SMALL
