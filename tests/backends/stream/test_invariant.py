"""Backend stream against ddp on one process: gradients, losses, norms, weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shardlab.model.lora import inject
from shardlab.recipe import SGD, LoraSection, ParameterGroup
from tests.backends.stream.support import Case, Outcome, relative, running, segments, train, whole, window
from tests.model.families import CONFIGS, gpt2, llama

ROWS = 512  # of a vocabulary of 64 rows of 32: four ranges
FAMILIES = ("llama", "tied llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "mixtral", "cohere")


@cache
def reference(case: Case, steps: int = 6) -> Outcome:
    return train(replace(case, rows_elements=None, activation_bytes=None), "ddp", steps)


def assert_same(case: Case, steps: int = 6) -> Outcome:
    """Losses, norms and, by SGD, weights to 1e-5; Adam divides a gradient's rounding by its size."""
    tolerance, for_weights = 1e-5, 1e-5 if isinstance(case.optimizer, SGD) else 1e-4
    mine, theirs = train(case, steps=steps), reference(case, steps)
    assert mine.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert mine.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert mine.evaluation == pytest.approx(theirs.evaluation, rel=tolerance)
    assert mine.tensors.keys() == theirs.tensors.keys()
    beyond = {n: d for n, v in mine.tensors.items() if not (d := relative(v, theirs.tensors[n])) <= for_weights}
    assert not beyond
    return mine


@pytest.mark.parametrize("rows", [None, ROWS], ids=["whole vocabulary", "vocabulary by rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_at_step_0(family: str, rows: int | None) -> None:
    """The weights after one step of SGD without clipping show the gradient; the large rate keeps its digits."""
    case = Case(family, clip=None, optimizer=SGD(name="sgd", lr=100.0), lr=100.0, rows_elements=rows)
    with running(case) as engine:
        before = whole(engine)
        assert segments(engine)["table"] == (1 if rows is None else 4)
    mine, theirs = train(case, steps=1), reference(case, 1)
    assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)
    # A gradient that is zero but for rounding (a router's, of top-1) is measured against the whole gradient.
    least = 1e-4 * 100.0 * theirs.norms[0]
    for name, value in mine.tensors.items():
        change, expected = value - before[name], theirs.tensors[name] - before[name]
        assert (change - expected).norm() <= 1e-5 * max(expected.norm(), least), name


@pytest.mark.parametrize("rows", [None, ROWS], ids=["whole vocabulary", "vocabulary by rows"])
@pytest.mark.parametrize("family", ["llama", "tied llama", "qwen3", "gemma2"])
def test_20_steps_of_adamw(family: str, rows: int | None) -> None:
    mine = assert_same(Case(family, rows_elements=rows, lr=1e-3, clip=1.0), steps=20)
    assert mine.losses[-1] < mine.losses[0]
    assert min(mine.norms) > 1.0, "the gradient must be above the limit, or clipping isn't tested"


@pytest.mark.parametrize("rows", [None, ROWS], ids=["whole vocabulary", "vocabulary by rows"])
@pytest.mark.parametrize("family", ["llama", "tied llama", "qwen3", "gemma2", "gpt2"])
def test_weights_after_3_steps_of_sgd(family: str, rows: int | None) -> None:
    assert_same(Case(family, rows_elements=rows, optimizer=SGD(name="sgd", lr=1.0), lr=1.0), steps=3)


VARIANTS = {
    "without clipping": Case(clip=None),
    "one micro-batch": Case(accumulation=1),
    "four micro-batches": Case(accumulation=4),
    "momentum": Case(optimizer=SGD(name="sgd", momentum=0.9, weight_decay=0.01), lr=0.5),
    "parameter groups": Case(
        optimizer=Case().optimizer.model_copy(
            update={"groups": (ParameterGroup(pattern="*norm*", lr=1e-3, weight_decay=0.0),)}
        )
    ),
    "dropout": Case(config=lambda: llama(dropout=0.3)),
    "dropout in the embedding": Case(config=lambda: gpt2(dropout=0.3), optimizer=SGD(name="sgd"), lr=0.5),
    "frozen embedding": Case(freeze=lambda name: "embed" in name),
    "frozen head": Case(freeze=lambda name: "lm_head" in name, rows_elements=ROWS),
    "frozen lower half": Case(freeze=lambda name: "embed" in name or ".0." in name or ".1." in name),
    "frozen tied embedding": Case("tied llama", freeze=lambda name: "embed" in name, rows_elements=ROWS, lr=1e-3),
    "frozen tensors in blocks": Case(freeze=lambda name: "q_proj" in name or "input_layernorm" in name),
    "spilled inputs": Case(activation_bytes=0),
    "some spilled inputs": Case(activation_bytes=3 * 2 * 12 * 32 * 4 * 3),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    assert_same(VARIANTS[name])


def test_adapters() -> None:
    """The base is frozen: nothing of it is updated, and gradients stop at the lowest adapter."""

    def adapt(model: nn.Module) -> nn.Module:
        return inject(model, LoraSection(rank=2, alpha=4, targets=["q_proj", "up_proj"], dropout=0.2))

    mine = assert_same(Case(adapt=adapt, lr=0.1))
    assert mine.losses[-1] < mine.losses[0]


@pytest.mark.parametrize("rows", [None, ROWS], ids=["whole vocabulary", "vocabulary by rows"])
@pytest.mark.parametrize("family", ["llama", "tied llama", "gpt2", "gemma3"])
def test_bf16_means_the_same(family: str, rows: int | None) -> None:
    case = Case(family, precision="bf16", lr=1e-3, rows_elements=rows)
    mine, theirs, exact = train(case), reference(case), reference(replace(case, precision="fp32"))
    assert mine.losses == pytest.approx(theirs.losses, abs=2e-2)
    assert mine.losses == pytest.approx(exact.losses, abs=2e-2)
    assert {tensor.dtype for tensor in mine.tensors.values()} == {torch.bfloat16}


def test_rows_give_the_bf16_loss_of_the_whole_head_but_for_rounding() -> None:
    case = Case(precision="bf16", lr=1e-3)
    assert train(replace(case, rows_elements=ROWS)).losses == pytest.approx(train(case).losses, abs=2e-3)


def test_a_window_that_is_not_finite_changes_nothing() -> None:
    """Moments and their step count are those before it, too."""

    def run(backend: str) -> tuple[Outcome, list[dict[str, torch.Tensor]]]:
        outcome, around = Outcome(), []
        with running(Case(), backend) as engine:
            block = engine._on.module.blocks[-1] if backend == "stream" else engine._job.module.blocks[-1]
            for step in range(5):
                hook = block.register_forward_hook(lambda _m, _a, output: output * float("inf")) if step == 3 else None
                around += [whole(engine)] if step == 3 else []
                outcome.applied.append(engine.run_window(window(step), 1e-2))
                around += [whole(engine)] if step == 3 else []
                if hook is not None:
                    hook.remove()
            outcome.tensors = whole(engine)
        return outcome, around

    mine, (before, after) = run("stream")
    theirs, _ = run("ddp")
    assert [one.skipped for one in mine.applied] == [False, False, False, True, False]
    assert not torch.isfinite(torch.tensor([mine.losses[3], mine.norms[3]])).any()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert mine.losses[4] == pytest.approx(theirs.losses[4], rel=1e-5)
    assert all(relative(value, theirs.tensors[name]) <= 1e-5 for name, value in mine.tensors.items())


def test_a_gradient_that_is_not_finite_behind_a_finite_loss_changes_nothing() -> None:
    with running(Case()) as engine:
        engine.run_window(window(0), 1e-2)
        before = whole(engine)

        class Spoil(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * float("nan")

        hook = engine._on.module.blocks[1].register_forward_hook(lambda _m, _a, output: Spoil.apply(output))
        applied = engine.run_window(window(1), 1e-2)
        hook.remove()
        assert applied.skipped
        assert applied.loss_sum == applied.loss_sum
        assert all(torch.equal(value, before[name]) for name, value in whole(engine).items())


def test_the_first_update_is_checked() -> None:
    with running(Case(lr=1e-2)) as engine:
        assert engine.unchanged_parameters() == []
        engine.run_window(window(0), 1e-2)
        assert engine.unchanged_parameters() == []
    with running(Case(lr=1e-2)) as engine:
        engine.run_window(window(0), 0.0)
        assert "model.norm.weight" in engine.unchanged_parameters()


def test_memory_holds_no_more_than_two_segments() -> None:
    """Between visits parameters have no memory of their own."""
    with running(Case()) as engine:
        engine.run_window(window(0), 1e-2)
        for _, parameter in engine._on.module.named_canonical():
            assert parameter.untyped_storage().nbytes() == parameter.element_size()


def test_every_family_is_known() -> None:
    assert set(FAMILIES) <= CONFIGS.keys()
