"""What a user may turn on, on two ranks of each backend against one process."""

from dataclasses import replace

import numpy as np
import pytest

from shardlab.backends import zero_config
from shardlab.recipe import ParameterGroup
from tests.distributed.compare import (
    BACKENDS,
    SHARDING,
    assert_bit_equal,
    assert_close,
    assert_tensors_agree,
    in_one_process,
)
from tests.distributed.conftest import Run
from tests.distributed.jobs import Case, Outcome

pytestmark = pytest.mark.slow

ADAMW = Case(optimizer="adamw", steps=3, lr=1e-2, micro=2)
FROZEN = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.input_layernorm.weight",
)
GROUPS = (
    ParameterGroup(pattern="*norm*", lr=1e-3, weight_decay=0.0),
    ParameterGroup(pattern="model.layers.1.*", lr=3e-2),
)
VARIANTS = {
    "without clipping": replace(ADAMW, optimizer="sgd", lr=0.5, clip=None),
    "tied embedding": replace(ADAMW, model="tied llama"),
    "dropout": replace(ADAMW, dropout=0.3),
    "recompute": replace(ADAMW, recompute="full"),
    "frozen tensors": replace(ADAMW, freeze=FROZEN),
    "parameter groups": replace(ADAMW, groups=GROUPS),
    "incomplete last window": replace(ADAMW, data="incomplete"),
    "ranks without targets": replace(ADAMW, data="lopsided"),
    "evaluation before the first step": replace(ADAMW, evaluate_first=True),
}


def assert_as_in_one_process(run: Run, case: Case, world: int = 2) -> list[Outcome]:
    outcomes, reference = run(case, world), run(in_one_process(case))[0]
    result = outcomes[0]
    assert_bit_equal(result.before, reference.before)
    assert_close(result.losses, reference.losses, 1e-5)
    assert_close(result.norms, reference.norms, 1e-5)
    assert_close(result.evaluation, reference.evaluation, 1e-5)
    assert_tensors_agree(result.after, reference.after, tolerance=1e-5)
    return outcomes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_variants(run: Run, backend: str, variant: str) -> None:
    assert_as_in_one_process(run, replace(VARIANTS[variant], backend=backend))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2"])
def test_compiled_blocks(run: Run, backend: str, recompute: str) -> None:
    """Dropout too: what is compiled draws the same numbers. Evaluation is not compiled."""
    assert_as_in_one_process(run, replace(VARIANTS["dropout"], backend=backend, recompute=recompute, compile=True))


@pytest.mark.parametrize("backend", SHARDING)
def test_cpu_offload(run: Run, backend: str) -> None:
    assert_as_in_one_process(run, replace(ADAMW, backend=backend, offload="cpu"))


@pytest.mark.parametrize("threshold", [100, zero_config.PERSISTENCE_THRESHOLD])
@pytest.mark.parametrize("evaluate_first", [False, True])
def test_zero3_with_small_parameters_kept_gathered(run: Run, threshold: int, evaluate_first: bool) -> None:
    assert_as_in_one_process(run, replace(ADAMW, backend="zero3", threshold=threshold, evaluate_first=evaluate_first))


@pytest.mark.parametrize("model", ["gpt2", "custom"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
def test_other_models(run: Run, backend: str, model: str) -> None:
    assert_as_in_one_process(run, Case(backend=backend, model=model, micro=2, dropout=0.3))


def test_groups_do_something(run: Run) -> None:
    """As with dropout. A group's first step with Adam is its own rate: sign(gradient) x lr, whatever the gradient."""
    case = replace(VARIANTS["parameter groups"], steps=1, clip=None)
    result = run(case)[0]
    moved = {name: np.abs(result.after[name] - result.before[name]).max() for name in result.before}
    assert moved["model.norm.weight"] == pytest.approx(1e-3, rel=1e-3)
    assert moved["model.layers.1.input_layernorm.weight"] == pytest.approx(1e-3, rel=1e-3), "the first that matches"
    assert moved["model.layers.1.mlp.up_proj.weight"] == pytest.approx(3e-2, rel=2e-2)
    assert moved["model.layers.0.mlp.up_proj.weight"] == pytest.approx(1e-2, rel=2e-2)


def test_dropout_does_something(run: Run) -> None:
    """The comparisons above would hold just as well if it did nothing."""
    still, dropped = run(ADAMW)[0], run(VARIANTS["dropout"])[0]
    assert abs(still.losses[0] - dropped.losses[0]) > 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_tensors_stay_as_they_are_and_have_no_optimizer_state(run: Run, backend: str) -> None:
    outcomes = run(replace(VARIANTS["frozen tensors"], backend=backend), 2)
    before, after = outcomes[0].before, outcomes[0].after
    assert_bit_equal({name: after[name] for name in FROZEN}, {name: before[name] for name in FROZEN})
    trained = sum(value.size for name, value in after.items() if name not in FROZEN)
    held = sum(outcome.state_elements for outcome in outcomes)
    if backend == "ddp":
        assert held == 2 * trained
    else:
        assert trained <= held <= trained + 2 * len(after)  # padding: shards of equal size


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_parameters_are_really_partitioned(run: Run, backend: str) -> None:
    """Otherwise tiny models hide what is wrong: below its threshold ZeRO-3 keeps parameters gathered."""
    outcomes = run(Case(backend=backend, steps=1, lr=100.0, clip=None), 2)
    for name, value in outcomes[0].before.items():
        held = [outcome.local_elements[name] for outcome in outcomes]
        assert held == [0, 0] if backend == "zero3" else sum(held) == value.size and max(held) < value.size


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_are_those_of_a_plain_model_on_every_rank(run: Run, backend: str) -> None:
    """https://github.com/huggingface/transformers/issues/48892: rotary frequencies were garbage."""
    for precision in ("fp32", "bf16"):
        for outcome in run(Case(backend=backend, steps=1, precision=precision), 2):
            frequencies = [v for name, v in outcome.buffers.items() if name.endswith("rotary_emb.inv_freq")]
            assert len(frequencies) == 1
            assert frequencies[0].tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
