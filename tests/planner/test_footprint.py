"""What each backend allocates, by arithmetic: against sums done by hand, and as it moves with ranks and adapters."""

from dataclasses import replace
from itertools import product

import pytest

from shardlab.backends import ddp_footprint, fsdp_footprint, zero_footprint
from shardlab.backends.placement import Setting
from shardlab.plan import BackendName, ModelShape, Moment, Offload, ParameterShape, Plan, Span
from shardlab.planner.around import standing
from shardlab.planner.predict import placed

BLOCK = 1_000_000
SHAPE = ModelShape(
    (
        ParameterShape("embedding", (1000, 500), True, 4),
        *(ParameterShape(f"block.{i}", (1000, 1000), True, i) for i in (1, 2)),
        ParameterShape("head", (1000, 500), True, 3),
    ),
    blocks=2,
    has_tail=True,
)
TOTAL = 3_000_000
EMPTY = tuple(
    Span(phase, segment, {}, {}, {})
    for phase, segments in (("forward", (0, 1, 2, 3)), ("backward", (3, 2, 1, 0)))
    for segment in segments
)
PLAN = Plan("ddp", 2, 1, 1, 2, "fp32")
PARTS_OF_ALL: tuple[BackendName, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp")
PARTS = {"ddp": ddp_footprint, "fsdp": fsdp_footprint}


def setting(backend: BackendName, **changes: object) -> Setting:
    given = {"shared_memory": False, **changes}
    return Setting(SHAPE, replace(PLAN, backend=backend, **given), 2, EMPTY)


def moments(of: Setting) -> list[Moment]:
    return list(PARTS.get(of.plan.backend, zero_footprint).footprint(of))


def peak(of: Setting) -> Moment:
    return max(moments(of), key=lambda moment: moment.total)


def states(of: Setting) -> int:
    """What is there all the time."""
    kinds = ("parameters", "masters", "moments", "gradients")
    return min(sum(moment.bytes.get(kind, 0) for kind in kinds) for moment in moments(of))


def test_one_model_on_every_rank_in_fp32() -> None:
    assert states(setting("ddp")) == TOTAL * (4 + 4 + 8)
    first = next(moment for moment in moments(setting("ddp")) if moment.name == "the first update")
    assert first.bytes["temporaries"] == BLOCK * 8


def test_bf16_adds_masters_to_a_copy_that_computes() -> None:
    assert states(setting("ddp", precision="bf16")) == TOTAL * (2 + 4 + 4 + 8)


def test_fsdp_shards_everything_and_gathers_a_unit() -> None:
    found = peak(setting("fsdp"))
    assert found.bytes["parameters"] == TOTAL * 4 // 2
    assert found.bytes["moments"] == TOTAL * 8 // 2
    forward = next(m for m in moments(setting("fsdp")) if m.name == "forward pass of block 2 of 2")
    assert forward.bytes["communication"] == 2 * BLOCK * 4  # the parameters, and what they were gathered in
    (whole,) = {
        m.bytes["communication"] for m in moments(setting("fsdp", shared_memory=True)) if m.name == forward.name
    }
    # A block is gathered into the first rank's piece; the second rank has its own as well, for a block's gradients.
    assert whole == BLOCK * 4 + 2 * BLOCK * 4


def test_stage_3_reduces_a_tied_gradient_while_the_weight_is_gathered() -> None:
    """The embedding's and head's one gradient is larger than a bucket; gloo needs two copies of it."""
    tied = replace(SHAPE.parameters[0], unit=0)
    of = replace(setting("zero3"), model=ModelShape((tied, *SHAPE.parameters[1:3]), 2, False))
    found = moments(of)
    reduced = next(m for m in found if m.name == "reduction after the backward pass of the embedding")
    resident = next(m for m in found if m.name == "the first update")
    assert reduced.total - resident.total == (1 + 1 + 2) * tied.numel * 4 - resident.bytes["temporaries"]
    assert not [m for m in moments(setting("zero3")) if m.name.startswith("reduction")]


@pytest.mark.parametrize("backend", PARTS_OF_ALL)
def test_ranks_share_what_a_checkpoint_holds(backend: BackendName) -> None:
    """Masters and two moments; so large is the copy that a save in the background is written from."""
    found = standing(setting(backend))
    assert found is not None
    assert found.saved == TOTAL * 12 // 2


def test_below_stage_3_the_weights_are_there_twice_while_the_model_is_built() -> None:
    """With many ranks that is more than a step takes; sharded from the start it is a unit."""
    whole, sharded, single = (standing(setting(b, world_size=8)) for b in ("zero2", "zero3", "fsdp"))
    assert whole is not None
    assert sharded is not None
    assert single is not None
    assert whole.building == TOTAL * 8 > sum(whole.resident.values())
    assert single.building == TOTAL * 4 // 8 + BLOCK * 4
    assert sharded.building < whole.building / 2


def test_what_is_not_trained_is_never_there_in_fp32_where_bf16_computes() -> None:
    frozen = ModelShape(tuple(replace(p, trainable=p.unit == 3) for p in SHAPE.parameters), 2, has_tail=True)
    found = standing(Setting(frozen, replace(PLAN, precision="bf16"), 2, EMPTY))
    assert found is not None
    assert found.building < TOTAL * 4


@pytest.mark.parametrize("backend", PARTS_OF_ALL)
def test_masks_are_whole_on_every_rank(backend: BackendName) -> None:
    """Their bits stay on the host."""
    plain = setting(backend)
    masked = replace(plain, masked=TOTAL // 8)
    for before, after in zip(placed(plain), placed(masked), strict=True):
        assert after.total == before.total + TOTAL // 8
    found, with_masks = standing(plain), standing(masked)
    assert found is not None
    assert with_masks is not None
    assert sum(with_masks.resident.values()) == sum(found.resident.values()) + TOTAL // 8
    assert with_masks.building == found.building + TOTAL // 8 + BLOCK * 4  # and a tensor whose zeros are set
    device = replace(masked, accelerator=True)
    for before, after in zip(placed(replace(plain, accelerator=True)), placed(device), strict=True):
        assert after.total == before.total
        assert after.host["parameters"] == before.host.get("parameters", 0) + TOTAL // 8


def test_rows_that_do_not_divide_are_padded() -> None:
    odd = Setting(
        ModelShape((ParameterShape("w", (5, 10), True, 0),), 0, False),
        replace(PLAN, backend="fsdp", world_size=4),
        2,
        (),
    )
    assert moments(odd)[0].bytes["parameters"] == 2 * 10 * 4


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_sharded_falls_with_the_ranks(backend: BackendName, precision: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4093: an estimate that did not divide."""
    sizes = [peak(setting(backend, precision=precision, world_size=world)).total for world in (2, 4, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize(("backend", "precision"), list(product(PARTS_OF_ALL, ("fp32", "bf16"))))
def test_frozen_weights_have_neither_gradients_nor_optimizer_state(backend: BackendName, precision: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5102: LoRA's state is the adapters'."""
    adapter = ParameterShape("adapter", (10, 10), True, 1)
    frozen = tuple(replace(p, trainable=False) for p in SHAPE.parameters)
    of = setting(backend, precision=precision)
    lora = replace(of, model=ModelShape((*frozen, adapter), 2, True))
    for moment in moments(lora):
        for kind in ("moments", "masters", "gradients"):
            assert moment.bytes.get(kind, 0) <= 100 * 8


@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp"])
def test_offloaded_state_moves_to_the_host_and_is_not_lost(backend: BackendName) -> None:
    both = Offload("cpu" if backend != "zero2" else "none", "cpu")
    device = replace(setting(backend), accelerator=True)
    moved = replace(device, plan=replace(device.plan, offload=both))
    assert peak(moved).total < peak(device).total
    assert sum(peak(moved).host.values()) >= TOTAL * 8 // 2
    on_cpu = replace(moved, accelerator=False)
    assert not peak(on_cpu).host
    assert peak(on_cpu).total >= peak(setting(backend)).total * 0.9  # nowhere else to go


def test_sgd_without_momentum_keeps_no_moments() -> None:
    assert all(not m.bytes.get("moments") for m in moments(replace(setting("ddp"), states=0)))


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_every_moment_has_a_name_and_no_negative_bytes(backend: BackendName) -> None:
    for precision, world, accumulation in product(("fp32", "bf16"), (1, 2, 3), (1, 4)):
        of = setting(backend, precision=precision, world_size=world, accumulation=accumulation)
        for moment in moments(of):
            assert moment.name
            assert min(moment.bytes.values()) >= 0
