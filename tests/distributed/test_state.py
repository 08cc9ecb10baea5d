"""Training state from any backend at any world size to any other: values, moments, and the next steps."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardlab.checkpoint import CheckpointReader, Contents
from shardlab.checkpoint.layout import assign, parts_of, plan_files
from shardlab.checkpoint.manifest import MANIFEST
from shardlab.checkpoint.save import manifest_of
from shardlab.checkpoint.storage import LocalStorage
from shardlab.checkpoint.write import write_files
from shardlab.state.box import Box
from shardlab.state.fragment import BUFFER, FROZEN, MASTER, Fragment, OptimizerState
from tests.distributed.compare import BACKENDS, assert_bit_equal, assert_close
from tests.distributed.pool import Pools
from tests.distributed.reader import Assembled
from tests.distributed.state_jobs import FROZEN as FROZEN_NAMES
from tests.distributed.state_jobs import Outcome, StateCase

pytestmark = pytest.mark.slow
JOBS = "tests.distributed.state_jobs"


@dataclass
class Saved:
    """What all ranks of a job hold together, and what rank 0 says."""

    state: Assembled
    first: Outcome
    ranks: list[Outcome]


Save = Callable[..., Saved]
Load = Callable[..., Saved]


def _together(outcomes: list[Outcome]) -> Saved:
    for outcome in outcomes:
        assert outcome.optimizer == outcomes[0].optimizer, "every rank must know the same"
        assert outcome.losses == outcomes[0].losses
        assert outcome.collectives == 0
        assert outcome.unchanged == []
    pieces = [piece for outcome in outcomes for piece in outcome.pieces]
    return Saved(Assembled.of(pieces, outcomes[0].optimizer), outcomes[0], outcomes)


@pytest.fixture(scope="module")
def save(pools: Pools) -> Save:
    """`save(case, world)`: a job's state after some updates, and how it went on; each job is run once."""
    known: dict[tuple[StateCase, int], Saved] = {}

    def save(case: StateCase, world: int) -> Saved:
        if (case, world) not in known:
            known[case, world] = _together(pools.run(world, JOBS, "save", case=case))
        return known[case, world]

    return save


@pytest.fixture(scope="module")
def load(pools: Pools) -> Load:
    """`load(state, case, world)`: a job that starts from `state`."""

    def load(state: Assembled, case: StateCase, world: int) -> Saved:
        return _together(pools.run(world, JOBS, "load", case=case, state=state))

    return load


def assert_same_state(one: Assembled, other: Assembled) -> None:
    """Every tensor of every kind in every bit, and the optimizer's numbers and groups by name."""
    assert one.tensors.keys() == other.tensors.keys()
    assert [key for key, value in one.tensors.items() if not np.array_equal(value, other.tensors[key])] == []
    assert one.dtypes == other.dtypes
    assert one.optimizer.kinds == other.optimizer.kinds
    assert one.optimizer.scalars == other.optimizer.scalars
    groups = [[group["names"] for group in state.optimizer.groups] for state in (one, other)]
    assert groups[0] == groups[1]


# Every ordered pair of backends, at numbers of ranks such that each backend is left and entered at 1, 2, 3 and 4 ranks
# and each pair of numbers occurs. Whether the boxes fit is tested below, for all pairs of both: here, what engines make
# of them. Where nothing changes, the losses must not either, in any bit.
PAIRS = [
    (source, 1 + (i + j) % 4, target, 1 + (i + 2 * j) % 4)
    for i, source in enumerate(BACKENDS)
    for j, target in enumerate(BACKENDS)
]
SAME = [(backend, 2, backend, 2) for backend in BACKENDS]


def test_the_design_covers_what_it_says() -> None:
    assert {(source, target) for source, _, target, _ in PAIRS} == {(b, c) for b in BACKENDS for c in BACKENDS}
    assert {(n, m) for _, n, _, m in PAIRS} == {(n, m) for n in range(1, 5) for m in range(1, 5)}
    assert {(source, n) for source, n, _, _ in PAIRS} == {(b, n) for b in BACKENDS for n in range(1, 5)}
    assert {(target, m) for _, _, target, m in PAIRS} == {(b, m) for b in BACKENDS for m in range(1, 5)}


@pytest.mark.parametrize(("source", "n", "target", "m"), dict.fromkeys([*PAIRS, *SAME]), ids=lambda value: str(value))
def test_any_to_any(save: Save, load: Load, source: str, n: int, target: str, m: int) -> None:
    saved = save(StateCase(source), n)
    loaded = load(saved.state, StateCase(target), m)
    assert_same_state(loaded.state, saved.state)
    assert_bit_equal(loaded.first.weights, saved.first.weights)
    if (source, n) == (target, m):
        assert loaded.first.losses == saved.first.losses
    assert_close(loaded.first.losses, saved.first.losses, 1e-6)


FILE_BYTES = 4096  # several files of a rank, and tensors that are cut


def test_every_checkpoint_gives_every_backend_its_boxes(save: Save, tmp_path: Path) -> None:
    """All 400 ordered pairs of backend and number of ranks, through the files: each box that a rank of the one holds,
    and each tensor whole, read from what the ranks of the other wrote."""
    jobs = [(backend, world) for backend in BACKENDS for world in range(1, 5)]
    layouts = {job: save(StateCase(job[0]), job[1]) for job in jobs}
    for number, source in enumerate(layouts.values()):
        directory = tmp_path / str(number)
        _write(directory, source)
        with CheckpointReader(directory) as reader:
            for target in layouts.values():
                assert target.state.tensors.keys() == source.state.tensors.keys()
                boxes = {(piece.name, piece.kind, piece.box) for rank in target.ranks for piece in rank.pieces}
                whole = {(name, kind, _whole(value)) for (name, kind), value in target.state.tensors.items()}
                for name, kind, box in boxes | whole:
                    expected = source.state.tensors[name, kind][box.slices]
                    read = torch.from_numpy(np.empty_like(expected))
                    reader.read_into(name, kind, box, read)
                    assert np.array_equal(read.numpy(), expected), (name, kind, box)


def _whole(value: np.ndarray) -> Box:
    return Box((0,) * value.ndim, value.shape)


def _write(directory: Path, saved: Saved) -> None:
    """What the ranks of a job hold, as their checkpoint."""
    directory.mkdir()
    held = [
        list(
            parts_of(
                (Fragment(p.name, p.kind, p.shape, p.box, torch.from_numpy(p.data)) for p in rank.pieces), FILE_BYTES
            )
        )
        for rank in saved.ranks
    ]
    shares = assign([[part for part, _ in parts] for parts in held])
    written = []
    for rank, (share, parts) in enumerate(zip(shares, held, strict=True)):
        written += write_files(directory, plan_files(share, rank, FILE_BYTES), parts, LocalStorage())
    contents = Contents(step=3, optimizer=saved.state.optimizer)
    (directory / MANIFEST).write_bytes(manifest_of(contents, written).dump())


CASES = {
    "adapters": StateCase("fsdp", lora=True),
    "before the first update": StateCase("ddp", updates=0),
    "momentum": StateCase("zero1", optimizer="momentum"),
    "an optimizer without state": StateCase("zero2", optimizer="sgd"),
    "offload": StateCase("zero3", offload="cpu"),
    "small parameters kept gathered": StateCase("zero3", threshold=10_000),
}


@pytest.mark.parametrize("case", CASES)
def test_from_backend_to_backend_and_back(save: Save, load: Load, case: str) -> None:
    """In one round, each takes what the one before it gives; the first goes on as if nothing had been."""
    first = CASES[case]
    at = BACKENDS.index(first.backend)
    others = ("ddp",) if first.threshold else BACKENDS[at + 1 :] + BACKENDS[:at]
    saved = loaded = save(first, 2)
    for backend in (*others, first.backend):
        loaded = load(loaded.state, replace(first, backend=backend), 2)
        assert_same_state(loaded.state, saved.state)
        assert_close(loaded.first.losses, saved.first.losses, 1e-6)
    assert_bit_equal(loaded.first.weights, saved.first.weights)
    assert loaded.first.losses == saved.first.losses


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_the_first_update_there_are_no_moments(save: Save, backend: str) -> None:
    optimizer = save(replace(CASES["before the first update"], backend=backend), 2).state.optimizer
    assert (optimizer.kinds, optimizer.scalars) == ((), {})
    assert [group["lr_scale"] for group in optimizer.groups] == [pytest.approx(0.2), 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_there_is(save: Save, backend: str) -> None:
    state = save(StateCase(backend), 2).state
    optimizer = state.optimizer
    assert optimizer.kinds == ("exp_avg", "exp_avg_sq")
    trained = {name for name in state.shapes() if MASTER in state.kinds(name)}
    assert optimizer.scalars == {name: {"step": 3.0} for name in trained}
    assert sorted(name for group in optimizer.groups for name in group["names"]) == sorted(trained)
    assert {name for name in state.shapes() if state.kinds(name) == {FROZEN}} == set(FROZEN_NAMES)
    buffers = {name: state.tensors[name, BUFFER] for name in state.shapes() if state.kinds(name) == {BUFFER}}
    assert {name: value.shape for name, value in buffers.items()} == {
        "model.passes": (),
        "model.layers.1.scale": (3, 2),
    }
    assert buffers["model.passes"] == 10
    assert state.dtypes["model.passes", BUFFER] == "torch.int64"
    assert "lm_head.weight" not in state.shapes()


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("distance", [0, 1])
def test_bf16(save: Save, load: Load, source: str, distance: int) -> None:
    """Masters and moments in every bit, and the same bf16 weights to compute with."""
    target = BACKENDS[(BACKENDS.index(source) + distance) % 5]
    saved = save(StateCase(source, precision="bf16"), 2)
    loaded = load(saved.state, StateCase(target, precision="bf16"), 2)
    for (name, kind), value in saved.state.tensors.items():
        if kind != FROZEN:  # FSDP keeps these in fp32, the others in bf16
            assert np.array_equal(loaded.state.tensors[name, kind], value), (name, kind)
            assert loaded.state.dtypes[name, kind] == saved.state.dtypes[name, kind]
    assert {saved.state.dtypes[name, kind] for name, kind in saved.state.tensors if kind == MASTER} == {"torch.float32"}
    assert loaded.state.optimizer.scalars == saved.state.optimizer.scalars
    assert_bit_equal(loaded.first.weights, saved.first.weights)
    if distance == 0:
        assert loaded.first.losses == saved.first.losses
    assert_close(loaded.first.losses, saved.first.losses, 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_weights_that_each_rank_reads_are_those_of_a_gather(
    save: Save, pools: Pools, backend: str, precision: str
) -> None:
    """On one host without accelerators no collective is needed; several hosts gather."""
    state = save(StateCase("fsdp", precision=precision), 2).state
    case = StateCase(backend, precision=precision)
    for loaded, gathered, collectives in pools.run(2, JOBS, "load_and_publish", case=case, state=state):
        assert collectives == 0
        assert_bit_equal(loaded, gathered)


HYBRID = StateCase("fsdp", replicas=2)


@pytest.mark.parametrize(("target", "world"), [(HYBRID, 4), (StateCase("ddp"), 3), (StateCase("zero3"), 2)])
def test_from_replicas_of_shards(save: Save, load: Load, target: StateCase, world: int) -> None:
    saved = save(HYBRID, 4)
    assert max(_written(outcome) for outcome in saved.ranks) < 0.3 * sum(map(_written, saved.ranks))
    loaded = load(saved.state, target, world)
    assert_same_state(loaded.state, saved.state)
    assert_close(loaded.first.losses, saved.first.losses, 1e-6)


def test_to_replicas_of_shards(save: Save, load: Load) -> None:
    saved = save(StateCase("ddp"), 2)
    loaded = load(saved.state, HYBRID, 4)
    assert_same_state(loaded.state, saved.state)
    assert_close(loaded.first.losses, saved.first.losses, 1e-6)


def _written(outcome: Outcome) -> int:
    return sum(piece.data.size for piece in outcome.pieces)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_writing_is_shared_out(save: Save, backend: str) -> None:
    written = [_written(outcome) for outcome in save(StateCase(backend), 2).ranks]
    assert max(written) < 0.55 * sum(written)


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_a_rank_reads_only_what_it_holds(save: Save, load: Load, backend: str) -> None:
    saved = save(StateCase("ddp"), 2)
    loaded = load(saved.state, StateCase(backend), 2)
    buffers = sum(value.size for (_, kind), value in saved.state.tensors.items() if kind == BUFFER)
    once = sum(value.size for value in saved.state.tensors.values())
    assert sum(outcome.elements_read for outcome in loaded.ranks) == once + buffers


@pytest.mark.parametrize("backend", BACKENDS)
def test_freezing_and_thawing_keep_the_values(save: Save, load: Load, backend: str) -> None:
    frozen, thawed = StateCase(backend), StateCase(backend, freeze=())
    for before, after, old, new in ((frozen, thawed, FROZEN, MASTER), (thawed, frozen, MASTER, FROZEN)):
        saved = save(before, 2)
        state = load(saved.state, after, 2).state
        for name in FROZEN_NAMES:
            assert np.array_equal(state.tensors[name, new], saved.state.tensors[name, old])
            for kind in state.kinds(name) - {new}:  # ZeRO keeps one state for a whole group
                assert backend.startswith("zero")
                assert not state.tensors[name, kind].any()
        others = [key for key in state.tensors if key[0] not in FROZEN_NAMES]
        assert [key for key in others if not np.array_equal(state.tensors[key], saved.state.tensors[key])] == []


def _without(state: Assembled, name: str) -> Assembled:
    return replace(state, tensors={key: value for key, value in state.tensors.items() if key[0] != name})


def _with(state: Assembled, name: str, kind: str, shape: tuple[int, ...]) -> Assembled:
    return replace(state, tensors=state.tensors | {(name, kind): np.zeros(shape, np.float32)})


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Assembled], Assembled], str]] = {
    "a tensor is missing": (lambda state: _without(state, NORM), "lacks 1 tensors, among them model.norm.weight"),
    "a buffer is missing": (lambda state: _without(state, "model.passes"), "lacks 1 tensors, among them model.passes"),
    "an unknown tensor": (lambda state: _with(state, "x.y", MASTER, (2,)), "has what the model lacks: 1 tensors.* x.y"),
    "another shape": (
        lambda state: _with(_without(state, NORM), NORM, MASTER, (33,)),
        r"norm.weight is \[33\] .*\[32\]",
    ),
    "another optimizer": (
        lambda state: _with(state, NORM, "momentum_buffer", (32,)),
        "keeps exp_avg, exp_avg_sq, momentum_buffer of model.norm.weight.*AdamW exp_avg, exp_avg_sq",
    ),
    "no step count": (lambda state: replace(state, optimizer=OptimizerState()), "not the number 'step'"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_of_another_run_is_refused(save: Save, pools: Pools, backend: str) -> None:
    state = save(StateCase("ddp"), 1).state
    states = {damage: spoil(state) for damage, (spoil, _) in DAMAGES.items()}
    for messages in pools.run(1, JOBS, "refuse", case=StateCase(backend), states=states):
        assert messages.keys() == DAMAGES.keys()
        assert [m for damage, m in messages.items() if not re.search(DAMAGES[damage][1], m)] == []


def test_the_counter_of_collectives_counts(pools: Pools) -> None:
    assert pools.run(2, JOBS, "count_one") == [1, 1]
