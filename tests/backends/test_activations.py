"""What blocks save, kept on the disk: the same losses and gradients, in every bit."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.backends import activations
from shardlab.backends.activations import DiskShelves, HostShelves
from shardlab.errors import UserError
from shardlab.model.trainable import Trainable
from tests.model.families import batch
from tests.model.test_recompute import EMBEDDING, MODELS, gradients, made

CPU = torch.device("cpu")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny block's memories lie across several."""
    monkeypatch.setattr(activations, "PIECE", 3 * activations.SECTOR)


def steps(trainable: Trainable, count: int = 3) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    """Loss and gradients of a few steps, the weights not changed."""
    found = []
    for step in range(count):
        loss, each = gradients(trainable, step)
        found.append((loss, {name: None if g is None else g.clone() for name, g in each.items()}))
    return found


def assert_equal(one: list[Any], other: list[Any]) -> None:
    for (loss, mine), (reference, theirs) in zip(one, other, strict=True):
        assert torch.equal(loss, reference)
        for name, gradient in theirs.items():
            if gradient is None:
                assert mine[name] is None
            else:
                assert torch.equal(mine[name], gradient), name


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_bit_equal(name: str, recompute: str, tmp_path: Path) -> None:
    trainable = made(name, recompute)
    shelves = DiskShelves(tmp_path, CPU)
    trainable.set_shelves(shelves)
    assert_equal(steps(trainable), steps(made(name, recompute)))
    assert shelves.bytes_moved > 0
    shelves.close()


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "auto"])
def test_the_host_s_shelves_keep_every_bit(recompute: str) -> None:
    """On a CPU, where copies are all that is left of them: what is kept, and when it goes."""
    trainable, shelves = made("llama", recompute), HostShelves(CPU)
    trainable.set_shelves(shelves)
    assert_equal(steps(trainable), steps(made("llama", recompute)))
    assert shelves._stack.last() is None, "nothing outlives its step"


def test_frozen_weights_need_nothing_else(tmp_path: Path) -> None:
    trainable, shelves = made("llama", "none", freeze=True), DiskShelves(tmp_path, CPU)
    trainable.set_shelves(shelves)
    found = steps(trainable, 1)
    assert_equal(found, steps(made("llama", "none", freeze=True), 1))
    assert found[0][1][EMBEDDING.get("llama", "model.embed_tokens.weight")] is None


def test_the_file_is_used_again_and_has_no_name(tmp_path: Path) -> None:
    trainable, shelves = made("llama", "none"), DiskShelves(tmp_path, CPU)
    trainable.set_shelves(shelves)
    steps(trainable, 1)
    size, moved = shelves._file.size, shelves.bytes_moved
    buffers = [buffer.data_ptr() for buffer in shelves._buffers]
    steps(trainable, 4)
    assert shelves._file.size == size
    assert [buffer.data_ptr() for buffer in shelves._buffers] == buffers
    assert shelves.bytes_moved == 5 * moved
    assert not os.listdir(tmp_path)
    shelves.close()


def test_a_forward_pass_without_a_backward_pass_leaves_nothing(tmp_path: Path) -> None:
    trainable, shelves = made("llama", "none"), DiskShelves(tmp_path, CPU)
    trainable.set_shelves(shelves)
    size = 0
    for _ in range(3):
        loss = trainable(batch(), 23.0)
        del loss
        gc.collect()
        assert shelves._stack.last() is None
        size = size or shelves._file.size
    assert shelves._file.size == size
    with torch.no_grad():
        before = shelves.bytes_moved
        trainable(batch(), 23.0)
    assert shelves.bytes_moved == before, "nothing is saved without gradients"
    shelves.close()


def test_masks_and_weights_stay_where_they_are(tmp_path: Path) -> None:
    """Each block would write its own copy of what is there once."""
    trainable, shelves = made("llama", "none"), DiskShelves(tmp_path, CPU)
    trainable.set_shelves(shelves)
    weights = sum(p.numel() * p.element_size() for p in trainable.blocks[0].parameters())
    kept: list[int] = []
    put = activations.DiskShelf.put

    def count(self: Any, storage: torch.UntypedStorage, device: torch.device) -> int:
        kept.append(storage.nbytes())
        return put(self, storage, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations.DiskShelf, "put", count)
        steps(trainable, 1)
    sizes = {p.numel() * p.element_size() for p in trainable.blocks[0].parameters() if p.dim() > 1}
    assert weights > 0
    assert sizes.isdisjoint(kept)
    rows, length = batch()["input_ids"].shape
    assert rows * length * length not in kept, "a mask of booleans"
    shelves.close()


def test_a_limit_is_kept(tmp_path: Path) -> None:
    trainable, shelves = made("llama", "none"), DiskShelves(tmp_path, CPU, limit=100_000)
    trainable.set_shelves(shelves)
    with pytest.raises(UserError, match="disk_limit"):
        steps(trainable, 1)
    shelves.close()


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be made"):
        DiskShelves(tmp_path / "file" / "under", CPU)
