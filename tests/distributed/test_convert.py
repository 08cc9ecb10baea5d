"""DeepSpeed's own checkpoints become ours: against DeepSpeed's own consolidation, and the stages against each other.

Field cases B36 and B38: https://github.com/deepspeedai/DeepSpeed/issues/3824 (frozen), issues/1896 (ties).
"""

from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from shardlab.checkpoint import CheckpointReader, verify
from shardlab.checkpoint.convert import convert
from shardlab.checkpoint.zero_write import ZeRO3Files
from shardlab.state.box import whole
from shardlab.state.fragment import BUFFER, FROZEN, MASTER
from tests.distributed.pool import Pools
from tests.distributed.zero_jobs import Small

pytestmark = pytest.mark.slow


def read(reader: CheckpointReader, name: str, kind: str) -> torch.Tensor:
    entry = reader.entry(name, kind)
    box = whole(entry.shape)
    assert box is not None
    into = torch.empty(entry.shape)
    reader.read_into(name, kind, box, into)
    return into


CASES = [(2, 1, False), (2, 2, False), (2, 3, False), (2, 1, True), (2, 2, True), (2, 3, True)]
CASES += [(3, 1, False), (3, 3, False)]  # 5 rows, and flat tensors, that three ranks can't share evenly


@pytest.mark.parametrize(("ranks", "stage", "bf16"), CASES)
def test_zero_files_become_a_checkpoint(pools: Pools, tmp_path: Path, ranks: int, stage: int, bf16: bool) -> None:
    theirs = tmp_path / "theirs"
    pools.run(ranks, "tests.distributed.zero_jobs", "save_zero", directory=str(theirs), stage=stage, bf16=bf16)
    path = convert(theirs, tmp_path / "ours")
    assert path.name == "step-00000003"
    verify(path)
    expected = dict(get_fp32_state_dict_from_zero_checkpoint(str(theirs)))
    assert ("frozen.weight" in expected) == (stage > 1)  # theirs loses them
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        frozen = Small().frozen.state_dict()
    expected |= {f"frozen.{name}": value.bfloat16() if bf16 else value for name, value in frozen.items()}
    with CheckpointReader(path) as reader:
        manifest = reader.manifest
        assert manifest.aliases == {"head.weight": "embed.weight"}
        assert set(reader.names()) | set(manifest.aliases) == set(expected)
        for name, value in expected.items():
            kind = BUFFER if name == "count" else FROZEN if name.startswith("frozen") else MASTER
            assert torch.equal(read(reader, name, kind), value.float()), name
        trained = [name for name in reader.names() if MASTER in reader.kinds(name)]
        assert all(reader.kinds(name) == {MASTER, "exp_avg", "exp_avg_sq"} for name in trained)
        assert all(reader.optimizer.scalars[name] == {"step": 3.0} for name in trained)
        rest, own = reader.optimizer.groups
        assert set(own["names"]) == {"a.weight", "a.bias"}
        assert (own["lr"], rest["lr"], own["weight_decay"]) == (1e-3, 1e-2, 0.0)
        assert set(rest["names"]) == set(trained) - {"a.weight", "a.bias"}


def test_every_stage_holds_the_same_moments(pools: Pools, tmp_path: Path) -> None:
    """By name: `a` and `c` have one shape, and a swap would show."""
    readers = []
    for stage in (1, 2, 3):
        theirs = tmp_path / f"theirs{stage}"
        pools.run(2, "tests.distributed.zero_jobs", "save_zero", directory=str(theirs), stage=stage, bf16=False)
        readers.append(CheckpointReader(convert(theirs, tmp_path / f"ours{stage}")))
    first, *others = readers
    assert not torch.equal(read(first, "a.weight", "exp_avg"), read(first, "c.weight", "exp_avg"))
    for entry in first.manifest.tensors:
        for other in others:
            left, right = (read(reader, entry.name, entry.kind) for reader in (first, other))
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-8), (entry.name, entry.kind)
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("bf16", [False, True])
def test_deepspeed_takes_what_is_written_for_stage_3(pools: Pools, tmp_path: Path, bf16: bool) -> None:
    """Its own engine loads it: weights and moments bit for bit, and the losses of the run that never stopped."""
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    back.mkdir()
    losses = pools.run(2, "tests.distributed.zero_jobs", "save_zero", directory=str(theirs), stage=3, bf16=bf16)
    path = convert(theirs, tmp_path / "ours")
    with CheckpointReader(path) as reader:
        ZeRO3Files(reader, 2, bf16=bf16, sub_group_elements=60).write(back)
        loaded = pools.run(2, "tests.distributed.zero_jobs", "load_zero", directory=str(back), bf16=bf16)
        assert [then for _, then in loaded] == losses
        for key, value in loaded[0][0].items():
            name, kind = key.split("|")
            assert torch.equal(read(reader, name, kind), value.float()), key
        assert len(loaded[0][0]) == sum(kind != BUFFER for name in reader.names() for kind in reader.kinds(name))
        first = reader.manifest
    again = CheckpointReader(convert(back, tmp_path / "again"))
    assert {(e.name, e.kind, e.shape) for e in again.manifest.tensors} == {
        (e.name, e.kind, e.shape) for e in first.tensors
    }
    assert (again.manifest.aliases, again.manifest.optimizer) == (first.aliases, first.optimizer)
    again.close()
