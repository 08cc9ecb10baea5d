"""One bit for each weight: any range and any box of a tensor is set to zero where the mask says so."""

from pathlib import Path

import pytest
import torch

from shardlab.errors import UserError
from shardlab.state import masks as module
from shardlab.state.box import Box
from shardlab.state.masks import MASKS, Masks

SHAPE = (5, 7, 3)


@pytest.fixture
def stays() -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) > 0.5


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_every_range_of_a_tensor(stays: torch.Tensor, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges begin and end within bytes: ZeRO cuts where it likes."""
    monkeypatch.setattr(module, "_PIECE", piece)
    masks, flat = Masks.of({"w": stays}), stays.flatten()
    for start in range(len(flat)):
        for stop in range(start, len(flat) + 1, 13):
            values = torch.ones(stop - start)
            masks.enforce("w", values, start)
            assert torch.equal(values, flat[start:stop].float())


def test_every_box_of_a_tensor_and_layouts_that_are_not_contiguous(stays: torch.Tensor) -> None:
    masks = Masks.of({"w": stays})
    for box in (Box((0, 0, 0), SHAPE), Box((1, 2, 1), (3, 4, 2)), Box((4, 6, 2), (1, 1, 1))):
        values = torch.ones(box.lengths)
        masks.enforce_box("w", box, SHAPE, values)
        assert torch.equal(values, stays[box.slices].float())
    turned = torch.ones(3, 7, 5).permute(2, 1, 0)
    masks.enforce("w", turned)
    assert torch.equal(turned, stays.float())


def test_the_file_and_what_is_known_of_it(stays: torch.Tensor, tmp_path: Path) -> None:
    masks = Masks.of({"w": stays, "none": torch.zeros(3, dtype=torch.bool)})
    (tmp_path / MASKS).write_bytes(masks.dump())
    read = Masks.read(tmp_path)
    assert torch.equal(read.stays("w", SHAPE), stays)
    assert read.counted() == int((~stays).sum()) + 3
    assert (read.frees("w", SHAPE), read.frees("none", (3,)), read.frees("another", (3,))) == (True, False, True)
    other = torch.ones(4)
    read.enforce("another", other)
    assert torch.equal(other, torch.ones(4))
    assert not Masks.read(tmp_path / "nowhere")


def test_masks_of_another_model_are_refused(stays: torch.Tensor, tmp_path: Path) -> None:
    masks = Masks.of({"alias": stays})
    assert set(masks.checked({"w": SHAPE}, {"alias": "w"})) == {"w"}
    with pytest.raises(UserError, match="no tensor alias"):
        masks.checked({"w": SHAPE}, {})
    with pytest.raises(UserError, match="alias has 210 elements, the mask 14 bytes"):
        masks.checked({"alias": (5, 7, 6)}, {})
    (tmp_path / MASKS).write_bytes(b"nothing")
    with pytest.raises(UserError, match="can't be read"):
        Masks.read(tmp_path)
