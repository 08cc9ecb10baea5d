"""A student's loss is the same on every backend, with its teacher whole, sharded or partitioned beside it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardlab.model.matching import PREFIX
from tests.distributed.compare import BACKENDS, assert_close, assert_tensors_agree
from tests.distributed.distill_jobs import PAIRS, Learned, Lesson, defined, teacher
from tests.distributed.jobs import Case
from tests.distributed.models import VOCABULARY
from tests.distributed.pool import Pools

LESSON = Lesson(Case(steps=3, lr=1.0, clip=1.0))
KEPT = replace(LESSON, kept=12)
MATCHED = replace(LESSON, hidden="mse")
PADDED = replace(LESSON, rows=VOCABULARY + 7, loss="jsd")


pytestmark = pytest.mark.slow

Learn = Callable[..., list[Learned]]


@pytest.fixture(scope="module")
def learn(pools: Pools) -> Learn:
    """`learn(lesson, world)`: what came of it on each rank; a lesson is run once."""
    known: dict[tuple[Lesson, int], list[Learned]] = {}

    def learn(lesson: Lesson, world: int = 1) -> list[Learned]:
        if (lesson, world) not in known:
            known[lesson, world] = pools.run(world, "tests.distributed.distill_jobs", "learn", lesson=lesson)
        return known[lesson, world]

    return learn


def on(backend: str) -> Lesson:
    return replace(LESSON, case=replace(LESSON.case, backend=backend, micro=2))


@pytest.mark.parametrize(
    "lesson",
    [
        LESSON,
        PADDED,
        MATCHED,
        replace(LESSON, hidden="cosine", case=replace(LESSON.case, recompute="full")),
        replace(LESSON, tied=True, loss="reverse_kl"),
    ],
    ids=str,
)
def test_in_one_process_as_by_plain_torch(learn: Learn, lesson: Lesson) -> None:
    assert_close(learn(lesson)[0].losses, defined(lesson), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_two_ranks_as_on_one(learn: Learn, backend: str) -> None:
    results, alone = learn(on(backend), 2), learn(LESSON)[0]
    for result in results:
        assert_close(result.losses, alone.losses, 1e-5)
        assert_close(result.norms, alone.norms, 1e-5)
        assert_close(result.evaluation, alone.evaluation, 1e-5)
    assert_tensors_agree(results[0].after, alone.after, tolerance=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_on_two_ranks_as_on_one(learn: Learn, backend: str) -> None:
    """The projections, of 24 rows that learn with the student, are sharded and in its training state."""
    alone = learn(MATCHED)[0]
    results = learn(replace(MATCHED, case=replace(MATCHED.case, backend=backend, micro=2)), 2)
    assert alone.losses[0] > learn(LESSON)[0].losses[0]
    for result in results:
        assert_close(result.losses, alone.losses, 1e-5)
        assert_close(result.norms, alone.norms, 1e-5)
        assert_close(result.evaluation, alone.evaluation, 1e-5)
    assert_tensors_agree(results[0].after, alone.after, tolerance=1e-5)
    names = {f"{PREFIX}{number}.weight" for number in range(len(PAIRS))}
    assert names <= results[0].after.keys()
    assert names <= results[0].fragments | results[1].fragments


def test_from_what_a_teacher_said_before_as_by_plain_torch(learn: Learn) -> None:
    """But for fp16, in which shares are kept."""
    assert_close(learn(KEPT)[0].losses, defined(KEPT), 1e-3)
    assert learn(KEPT)[0].losses[0] < learn(LESSON)[0].losses[0]  # of fewer outcomes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_was_said_before_on_two_ranks_as_on_one(learn: Learn, backend: str, precision: str) -> None:
    lesson = replace(KEPT, case=replace(KEPT.case, precision=precision))
    alone = learn(lesson)[0]
    result = learn(replace(lesson, case=replace(lesson.case, backend=backend, micro=2)), 2)[0]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert_close(result.losses, alone.losses, tolerance)
    if precision == "fp32":
        assert_close(result.norms, alone.norms, tolerance)
        assert_tensors_agree(result.after, alone.after, tolerance=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_teacher_is_sharded_as_the_student_and_never_saved(learn: Learn, backend: str) -> None:
    results = learn(on(backend), 2)
    whole = sum(parameter.numel() for parameter in teacher(tied=False, rows=VOCABULARY).parameters())
    share = whole if backend in ("ddp", "zero1", "zero2") else whole / 2
    assert results[0].teacher_elements == pytest.approx(share, rel=0.1)
    assert results[0].fragments | results[1].fragments == results[0].after.keys()


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_and_padded_teacher(learn: Learn, backend: str, precision: str) -> None:
    lesson = replace(PADDED, tied=True, case=replace(LESSON.case, model="tied llama", precision=precision))
    reference = learn(lesson)[0]
    result = learn(replace(lesson, case=replace(lesson.case, backend=backend)), 2)[0]
    assert_close(result.losses, reference.losses, 1e-5 if precision == "fp32" else 2e-2)
