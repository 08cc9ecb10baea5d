"""PyTorch DCP's checkpoints become ours and ours theirs, bit for bit by name, moments included. Field case B38."""

from pathlib import Path

import pytest
import torch

from shardlab.checkpoint import CheckpointReader, verify
from shardlab.checkpoint.convert import convert
from shardlab.checkpoint.convert_to import convert_to
from shardlab.state.fragment import BUFFER, FROZEN, MASTER
from tests.distributed.pool import Pools
from tests.distributed.test_convert import read

pytestmark = pytest.mark.slow

JOBS = "tests.distributed.dcp_jobs"


def check(path: Path, saved: dict[str, torch.Tensor]) -> None:
    """Every value of `saved` is in the checkpoint, and no other."""
    with CheckpointReader(path) as reader:
        seen = set()
        for key, value in saved.items():
            if key.startswith("model."):
                name = key.removeprefix("model.")
                kind = BUFFER if name == "count" else MASTER if f"{name}.step" in saved else FROZEN
            else:
                name, _, kind = key.rpartition(".")
            if kind == "step":
                assert reader.optimizer.scalars[name] == {"step": value.item()}
                continue
            assert torch.equal(read(reader, name, kind), value.float()), key
            seen.add((name, kind))
        assert seen == {(entry.name, entry.kind) for entry in reader.manifest.tensors}


@pytest.mark.parametrize(("form", "ranks"), [("nested", 2), ("flat", 2), ("app", 2), ("nested", 1), ("nested", 3)])
def test_theirs_becomes_ours(pools: Pools, tmp_path: Path, form: str, ranks: int) -> None:
    theirs = tmp_path / "theirs"
    plain = ranks == 1
    saved, _ = pools.run(ranks, JOBS, "save_dcp", directory=str(theirs), form=form, plain=plain)[0]
    path = convert(theirs, tmp_path / "ours")
    assert path.name == "step-00000003"
    verify(path)
    check(path, saved)
    with CheckpointReader(path) as reader:
        rest, own = sorted(reader.optimizer.groups, key=lambda group: -len(group["names"]))
        assert set(own["names"]) == {"a.weight", "a.bias"}
        assert (own["lr"], rest["lr"], own["weight_decay"], own["betas"]) == (1e-3, 1e-2, 0.0, (0.9, 0.999))


def test_a_model_alone_has_no_moments(pools: Pools, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    saved, _ = pools.run(2, JOBS, "save_dcp", directory=str(theirs), form="model")[0]
    path = convert(theirs, tmp_path / "ours")
    assert path.name == "step-00000000"
    with CheckpointReader(path) as reader:
        assert reader.manifest.optimizer.groups == ()
        for key in saved:
            if key.startswith("model."):
                name = key.removeprefix("model.")
                kind = BUFFER if name == "count" else MASTER
                assert reader.kinds(name) == {kind}
                assert torch.equal(read(reader, name, kind), saved[key].float())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ours_becomes_theirs_and_trains_on(pools: Pools, tmp_path: Path, ranks: int) -> None:
    """Saved by two ranks, loaded by DCP itself into FSDP2 or a plain model."""
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    results = pools.run(2, JOBS, "save_dcp", directory=str(theirs))
    convert_to(convert(theirs, tmp_path / "ours"), back, "dcp")
    loaded = pools.run(ranks, JOBS, "load_dcp", directory=str(back), plain=ranks == 1)
    saved = results[0][0]
    assert loaded[0][0].keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[0][0][key], value), key
    if ranks == 2:
        assert [losses for _, losses in loaded] == [losses for _, losses in results]
    check(convert(back, tmp_path / "again"), saved)
