"""bf16 and 8-bit state: the codes and updates of the field's own tools, what rounding does, and what is learned."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.backends.stream.buffers import Buffer
from shardlab.backends.stream.encoding import BLOCK, CHUNK, Blockwise8, Format, Scratch, dynamic_map
from shardlab.recipe import AdamW
from tests.backends.stream.support import Case, Outcome, kept, relative, running, train, whole, window
from tests.backends.stream.test_crash import assert_goes_on, dying, run_on
from tests.backends.stream.test_state import steps, taken

ALL_SMALL = {"masters": "bf16", "moments": "8bit", "gradients": "bf16"}
LR = 1e-3
# Largest relative difference of 20 losses to those of fp32 state, and of a tensor after them. Measured, computing in
# fp32: 3.5e-5 and 6.4e-3, 5.1e-4 and 4.6e-2, 2.3e-6 and 3.2e-4, 4.5e-4 and 4.6e-2; in bf16 at most 5.2e-4 and 4.6e-2.
BOUNDS = {
    "moments": (1e-4, 2e-2),
    "masters": (1.5e-3, 0.1),
    "gradients": (1e-5, 1e-3),
    "all": (1.5e-3, 0.1),
}


def encoded(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales)."""
    codes, scales = torch.empty(len(values), dtype=torch.uint8), torch.empty(len(values) // BLOCK)
    Blockwise8(signed).encode(values.clone(), [codes, scales], Scratch())
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    return Blockwise8(signed).decode([codes, scales], torch.empty(len(codes)), Scratch())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(64 * BLOCK) * torch.logspace(-12, 3, 64).repeat_interleave(BLOCK)
    values = values if signed else values.square()
    values[: 2 * BLOCK] = 0
    codes, scales = encoded(values, signed)
    assert torch.equal(scales, values.view(-1, BLOCK).abs().amax(1).clamp_min(1e-12))
    normal = values / scales.repeat_interleave(BLOCK)
    best = (normal.unsqueeze(1) - dynamic_map(signed)).abs().amin(1)
    mine = (normal - dynamic_map(signed)[codes.long()]).abs()
    assert (mine - best).max() <= 2**-11
    assert (mine > best + 1e-7).float().mean() < 0.02
    assert torch.equal(decoded(codes, scales, signed)[: 2 * BLOCK], torch.zeros(2 * BLOCK))


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_the_field(signed: bool) -> None:
    quantization = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    assert torch.allclose(dynamic_map(signed), torch.tensor(quantization.create_dynamic_map(signed)), atol=1e-7)


def test_updates_are_those_of_torchao() -> None:
    """Twenty of its AdamW8bit, from the same values and gradients."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.manual_seed(0)
    value = torch.randn(32, BLOCK)
    theirs = torch.nn.Parameter(value.clone())
    optimizer = optim.AdamW8bit([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, block_size=BLOCK)
    form = Format(2, torch.float32, moments="8bit")
    piece = Buffer(form, value.numel()).state(value.numel())
    every = slice(0, value.numel())
    piece.encode(every, [value.flatten().clone(), torch.zeros(value.numel()), torch.zeros(value.numel())])
    for step in range(1, 21):
        gradient = torch.randn_like(value) * torch.logspace(-3, 0, 32).unsqueeze(1)
        theirs.grad = gradient.clone()
        with torch.compiler.set_stance("force_eager"):  # it would be compiled, for a minute
            optimizer.step()
        mine, first, second = piece.decode(every)
        torch._fused_adamw_(
            [mine], [gradient.flatten()], [first], [second], [], [torch.tensor(float(step))], amsgrad=False, lr=1e-2,
            beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
        piece.encode(every, [mine, first, second])
    change, expected = piece.masters(every).view_as(value) - value, theirs.detach() - value
    assert relative(change, expected) < 0.01


def test_rounding_to_bf16_is_right_on_average() -> None:
    """Between two neighbours, by chance; a number that is one of them stays."""
    form = Format(0, torch.bfloat16, masters="bf16")
    piece = Buffer(form, CHUNK).state(CHUNK)
    every, step = slice(0, CHUNK), 2.0**-7
    for value, low in ((1 + 0.25 * step, 1.0), (-1 - 0.9 * step, -1 - step), (3.0, 3.0)):
        piece.encode(every, [torch.full((CHUNK,), value)])
        found = piece.masters(every).float()
        assert found.unique().tolist() == ([low] if value == low else [low, low + step])
        assert float(found.double().mean()) == pytest.approx(value, abs=4 * step / CHUNK**0.5)
    piece.encode(every, [torch.full((CHUNK,), 1 + 0.25 * step)], nearest=True)
    assert piece.masters(every).float().unique().tolist() == [1.0]


@cache
def straight(precision: str) -> Outcome:
    return train(Case("tied llama", precision, lr=LR, clip=1.0, accumulation=2), steps=20)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", BOUNDS)
def test_20_losses_beside_those_of_fp32_state(what: str, precision: str) -> None:
    small = ALL_SMALL if what == "all" else {what: ALL_SMALL[what]}
    case = Case("tied llama", precision, lr=LR, clip=1.0, accumulation=2, optimizer=AdamW(lr=LR, **small))
    mine, theirs = train(case, steps=20), straight(precision)
    for_losses, for_weights = BOUNDS[what] if precision == "fp32" else (1.5e-3, 0.1)
    assert mine.losses != theirs.losses
    assert mine.losses == pytest.approx(theirs.losses, rel=for_losses)
    unlike = max(relative(value.float(), theirs.tensors[name].float()) for name, value in mine.tensors.items())
    assert unlike < for_weights
    assert theirs.losses[-1] < theirs.losses[0] - 0.1


@pytest.mark.parametrize(("source", "target"), [("stream", "ddp"), ("ddp", "stream"), ("stream", "stream")])
def test_small_state_goes_to_every_backend_and_back(source: str, target: str) -> None:
    """As fp32 fragments, which other backends take as they are."""
    cases = {"stream": Case(optimizer=AdamW(lr=LR, **ALL_SMALL), accumulation=2), "ddp": Case(accumulation=2)}
    with running(cases[source], source) as engine:
        for step in range(3):
            engine.run_window(window(step, 2), LR)
        saved = taken(engine)
        losses = steps(engine, 3, cases[source])
    assert set(saved.dtypes.values()) == {"torch.float32"}
    with running(replace(cases[target], seed=1), target) as engine:
        engine.load(saved)
        back = taken(engine)
        assert steps(engine, 3, cases[target]) == pytest.approx(losses, rel=2e-3)
    assert back.optimizer.scalars == saved.optimizer.scalars
    # From fp32 8 bits lose up to 1.2%. The map has 1 and not -1: stored anew, a block whose largest is negative gets
    # another scale.
    limit = {"ddp": 0.0, "stream": 0.03 if source == "ddp" else 0.01}[target]
    for key, value in saved.tensors.items():
        assert relative(torch.as_tensor(back.tensors[key]), torch.as_tensor(value)) <= limit, key


def test_a_crash_changes_nothing_of_small_state(tmp_path: Path) -> None:
    """Rounding by chance too is what it would have been."""
    case = Case("tied llama", rows_elements=512, accumulation=2, optimizer=AdamW(lr=1e-2, **ALL_SMALL))
    expected = run_on(tmp_path / "straight", case, resume=False)
    dying(tmp_path / "state", case, 30, after=2)
    assert_goes_on(tmp_path / "state", case, expected)


def test_small_state_takes_less_disk_and_is_what_is_said(tmp_path: Path) -> None:
    sizes = {}
    for name, small in (("fp32", {}), ("small", ALL_SMALL)):
        with running(Case(optimizer=AdamW(lr=LR, **small)), directory=tmp_path / name) as engine:
            layout, moved = kept(engine, tmp_path / name), engine.traffic
            engine.run_window(window(0), LR)
            before = moved.read, moved.written
            engine.run_window(window(1), LR)
            sizes[name] = (layout, moved.read - before[0], moved.written - before[1])
            assert whole(engine)
    # At this size sectors count: the figures of a large model are 16, 20 and 16 bytes, and 6, 8 and 6.
    assert all(small < 0.6 * full for small, full in zip(sizes["small"], sizes["fp32"], strict=True))


def form_of(**small: Any) -> Format:
    return Format(2, torch.bfloat16, **small)


def test_bytes_of_an_element() -> None:
    elements = 1 << 20
    assert form_of().state_bytes(elements) == 12 * elements
    assert form_of(moments="8bit").state_bytes(elements) == (6 + 8 / BLOCK) * elements
    assert form_of(masters="bf16", moments="8bit").state_bytes(elements) == (4 + 8 / BLOCK) * elements
    assert form_of(gradients="bf16").gradient.size(elements) == 2 * elements
    assert form_of().scratch_bytes(elements) == 0
    assert form_of(moments="8bit").scratch_bytes(elements) == 3 * 4 * CHUNK
