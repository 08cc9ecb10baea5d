import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from shardlab.data.user_batches import shifted, windows_from_batches
from shardlab.data.window import IGNORED, Window
from shardlab.errors import UserError


class _ThreadRanks:
    """Ranks as threads of this process, with a real sum over them."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=240)
        self._shared: list[Tensor] = []
        self.calls = 0

    def all_reduce(self, tensor: Tensor) -> None:
        self._shared.append(tensor.clone())
        if self._barrier.wait() == 0:
            self.calls += 1
        tensor.copy_(torch.stack(self._shared).sum(0))
        if self._barrier.wait() == 0:
            self._shared.clear()
        self._barrier.wait()

    def run(self, loaders: list[list[dict[str, Tensor]]], accumulation: int) -> list[list[Window]]:
        results: list[list[Window]] = [[] for _ in loaders]

        def rank_main(rank: int) -> None:
            results[rank] = list(
                windows_from_batches(
                    iter(loaders[rank]),
                    accumulation=accumulation,
                    rank=rank,
                    world_size=len(loaders),
                    all_reduce=self.all_reduce,
                )
            )

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        return results


def _batches(count: int, first: int = 0, length: int = 4) -> list[dict[str, Tensor]]:
    """Batches of one row whose tokens tell it apart."""
    rows = [torch.arange(length)[None] + 10 * (first + number) for number in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def _valid(windows: Iterable[Window]) -> list[int]:
    targets = [micro.tensors["targets"] for window in windows for micro in window.micro_batches]
    return sorted(torch.cat([values[values != IGNORED] for values in targets]).tolist())


@pytest.mark.parametrize("counts", [(3, 2), (2, 3), (5, 0), (0, 0), (1, 4, 2)])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_ranks_with_different_numbers_of_batches_end_together(counts, accumulation):
    """https://github.com/deepspeedai/DeepSpeed/issues/2223"""
    loaders = [_batches(count, first=10 * rank) for rank, count in enumerate(counts)]
    ranks = _ThreadRanks(len(counts))
    results = ranks.run(loaders, accumulation)
    assert {len(windows) for windows in results} == {-(-max(counts) // accumulation)}
    assert ranks.calls == len(results[0]) + 1  # one per window, and the one that says nobody has more
    for step, windows in enumerate(zip(*results, strict=True)):
        micro_batches = [micro_batch for window in windows for micro_batch in window.micro_batches]
        assert {window.step for window in windows} == {step}
        assert len({len(window.micro_batches) for window in windows}) == 1
        assert sorted(micro_batch.index for micro_batch in micro_batches) == list(range(len(micro_batches)))
        assert {window.tokens for window in windows} == {len(_valid(windows))}
    if max(counts):
        expected = [int(token) for loader in loaders for batch in loader for token in batch["labels"][0, 1:]]
        assert _valid(window for windows in results for window in windows) == sorted(expected)


def test_one_process_needs_no_all_reduce_and_starts_at_its_step():
    windows = list(windows_from_batches(_batches(5), accumulation=2, start_step=7))
    assert [(window.step, len(window.micro_batches), window.tokens) for window in windows] == [
        (7, 2, 6),
        (8, 2, 6),
        (9, 1, 3),
    ]


def test_several_ranks_without_an_all_reduce_are_refused():
    with pytest.raises(ValueError, match="need an all_reduce"):
        next(windows_from_batches(_batches(1), accumulation=1, world_size=2))


def test_labels_are_shifted_by_one():
    tensors = shifted({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 6, 7]])})
    assert tensors["targets"].tolist() == [[6, 7, IGNORED]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2]]
    assert set(tensors) == {"input_ids", "targets", "position_ids"}


def test_padding_is_ignored_by_position_and_never_by_token():
    """The end token, which is the padding token too, stays a target.

    https://github.com/huggingface/trl/issues/1623
    """
    row = torch.tensor([[5, 6, 2, 2, 2]])
    tensors = shifted({"input_ids": row, "labels": row, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])})
    assert tensors["targets"].tolist() == [[6, 2, IGNORED, IGNORED, IGNORED]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("position_ids", [None, torch.arange(5)[None]])
def test_left_padding_is_kept_apart_by_positions(position_ids):
    row = torch.tensor([[2, 2, 5, 6, 7]])
    batch = {"input_ids": row, "labels": row, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    tensors = shifted(batch if position_ids is None else {**batch, "position_ids": position_ids})
    assert tensors["targets"].tolist() == [[IGNORED, IGNORED, 6, 7, IGNORED]]
    assert tensors["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert "attention_mask" not in tensors


def test_a_users_own_packing_is_respected():
    """https://github.com/huggingface/trl/issues/805"""
    row = torch.tensor([[1, 2, 3, 4, 5]])
    tensors = shifted({"input_ids": row, "labels": row, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])})
    assert tensors["targets"].tolist() == [[2, IGNORED, 4, 5, IGNORED]]
    assert tensors["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_targets_and_a_classifiers_labels_are_taken_as_they_are():
    row = torch.tensor([[1, 2, 3]])
    assert shifted({"input_ids": row, "targets": row})["targets"] is row
    mask = torch.tensor([[1, 1, 0]])
    classifier = shifted({"input_ids": row, "attention_mask": mask, "labels": torch.tensor([1])})
    assert classifier["targets"].tolist() == [1]
    assert classifier["attention_mask"] is mask


def test_a_batch_without_labels_is_refused_with_its_keys():
    with pytest.raises(UserError, match=r"needs 'labels' or 'targets'; the loader's has \['input_ids'\]"):
        shifted({"input_ids": torch.tensor([[1]])})
