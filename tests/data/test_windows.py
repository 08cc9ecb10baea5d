import numpy as np
import pytest
import torch

from shardlab.data.order import rows_at
from shardlab.data.packing import PackedRows
from shardlab.data.tokens import TokenStream
from shardlab.data.window import IGNORED, Window
from shardlab.data.windows import WindowLoader, evaluation_batches
from shardlab.errors import UserError

T = 6
LAYOUTS = [
    (1, 12),
    (1, 4),
    (1, 1),
    (2, 3),
    (2, 6),
    (3, 2),
    (4, 3),
    (4, 1),
]  # (world size, micro-batch) of a batch of 12


def _rows() -> PackedRows:
    """29 rows; documents of many lengths, so that the rows' token counts differ."""
    lengths = np.random.default_rng(0).integers(1, 9, size=40)
    tokens = np.arange(lengths.sum(), dtype=np.uint16)  # each token its own position: rows can be told apart
    return PackedRows(TokenStream(tokens, np.cumsum(lengths)), sequence_length=T, eos=0)


def _loader(rows: PackedRows, rank: int = 0, world_size: int = 1, micro_batch: int = 12, **fields: int) -> WindowLoader:
    settings = {"global_batch_size": 12, "seed": 5, "steps": 6, **fields}
    return WindowLoader(rows, rank=rank, world_size=world_size, micro_batch=micro_batch, **settings)


def _global(windows: list[Window], key: str) -> torch.Tensor:
    """The whole batch of one step, in the order of the micro-batches' global index."""
    micro_batches = sorted(
        (micro_batch for window in windows for micro_batch in window.micro_batches), key=lambda micro: micro.index
    )
    assert [micro_batch.index for micro_batch in micro_batches] == list(range(len(micro_batches)))
    return torch.cat([micro_batch.tensors[key] for micro_batch in micro_batches])


def _same(left: Window, right: Window) -> bool:
    if (left.step, left.tokens, len(left.micro_batches)) != (right.step, right.tokens, len(right.micro_batches)):
        return False
    return all(
        one.index == other.index and all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
        for one, other in zip(left.micro_batches, right.micro_batches, strict=True)
    )


@pytest.mark.parametrize(("world_size", "micro_batch"), LAYOUTS)
def test_a_steps_batch_does_not_depend_on_ranks_and_micro_batch(world_size, micro_batch):
    rows = _rows()
    ranks = [_loader(rows, rank, world_size, micro_batch) for rank in range(world_size)]
    for whole, *windows in zip(_loader(rows), *ranks, strict=True):
        assert {window.step for window in windows} == {whole.step}
        assert {window.tokens for window in windows} == {whole.tokens}
        for key, values in whole.micro_batches[0].tensors.items():
            assert torch.equal(_global(windows, key), values)


def test_tokens_count_the_targets_of_the_global_batch():
    """https://github.com/huggingface/trl/issues/2175"""
    rows = _rows()
    for windows in zip(*[_loader(rows, rank, 2, 3) for rank in range(2)], strict=True):
        counted = int((_global(list(windows), "targets") != IGNORED).sum())
        assert [window.tokens for window in windows] == [counted, counted]


def test_rows_come_in_the_sample_order_epoch_after_epoch():
    rows = _rows()
    positions = np.arange(6 * 12)
    expected = rows.batch(rows_at(positions, len(rows), 5))["input_ids"]
    assert torch.equal(torch.cat([_global([window], "input_ids") for window in _loader(rows)]), expected)


@pytest.mark.parametrize("start_step", [0, 1, 5, 6, 9])
def test_a_resumed_loader_goes_on_where_the_other_was(start_step):
    rows = _rows()
    resumed = _loader(rows, 1, 2, 3, start_step=start_step)
    expected = list(_loader(rows, 1, 2, 3))[start_step:]
    assert len(resumed) == len(expected)
    assert all(_same(*pair) for pair in zip(resumed, expected, strict=True))


def test_lives_at_other_world_sizes_take_the_straight_runs_rows():
    """https://github.com/huggingface/transformers/issues/23099: a position in steps of one rank, not in samples.

    Two ranks up to step 3, then three up to step 5, then one; over two epochs and a half.
    """
    rows, taken = _rows(), []
    for start, stop, world_size, micro_batch in ((0, 3, 2, 3), (3, 5, 3, 2), (5, 6, 1, 4)):
        ranks = [_loader(rows, rank, world_size, micro_batch, start_step=start) for rank in range(world_size)]
        lives = [_global(list(windows), "input_ids") for windows in zip(*ranks, strict=True)]
        taken += lives[: stop - start]
    assert torch.equal(torch.cat(taken), torch.cat([_global([window], "input_ids") for window in _loader(rows)]))


def test_iterating_again_gives_the_same():
    loader = _loader(_rows())
    assert all(_same(*pair) for pair in zip(loader, loader, strict=True))


@pytest.mark.parametrize(("world_size", "micro_batch"), LAYOUTS)
def test_one_epoch_ends_with_a_filled_window_and_uses_each_row_once(world_size, micro_batch):
    """https://github.com/huggingface/accelerate/issues/125"""
    rows = _rows()
    ranks = [_loader(rows, rank, world_size, micro_batch, total_samples=len(rows)) for rank in range(world_size)]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == len(ranks[0]) == 3  # 29 rows by 12
    assert {len(window.micro_batches) for windows in steps for window in windows} == {12 // world_size // micro_batch}
    targets = torch.cat([_global(list(windows), "targets") for windows in steps])
    every = rows.batch(range(len(rows)))["targets"]
    assert sorted(targets[targets != IGNORED].tolist()) == sorted(every[every != IGNORED].tolist())
    assert sum(windows[0].tokens for windows in steps) == int((every != IGNORED).sum())


def test_batch_sizes_that_do_not_multiply_are_refused():
    with pytest.raises(
        UserError, match=r"global_batch_size 12 is not a multiple of shard\.micro_batch 5 x 2 ranks = 10"
    ):
        _loader(_rows(), world_size=2, micro_batch=5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 7])
def test_each_evaluated_row_counts_exactly_once(world_size, micro_batch):
    """Rows with ids 0 to 4: the sum over what counts is 10, however many ranks share them.

    https://github.com/huggingface/accelerate/issues/226
    """
    rows = PackedRows(TokenStream(np.arange(6, dtype=np.uint16), np.array([6])), sequence_length=1, eos=0)
    ranks = [
        list(evaluation_batches(rows, micro_batch=micro_batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    batches = [batch for own in ranks for batch in own]
    counted = [batch.tensors["input_ids"][batch.tensors["targets"] != IGNORED] for batch in batches]
    assert sorted(torch.cat(counted).tolist()) == [0, 1, 2, 3, 4]
    assert len({len(own) for own in ranks}) == 1
    assert len({batch.index for batch in batches}) == len(batches)


def test_an_evaluation_limit_counts_rows_over_all_ranks():
    rows = _rows()
    batches = [
        b for rank in range(2) for b in evaluation_batches(rows, micro_batch=2, rank=rank, world_size=2, limit=5)
    ]
    targets = torch.cat([batch.tensors["targets"] for batch in batches])
    assert int((targets != IGNORED).sum()) == rows.valid_tokens(range(5))
