"""Files: sizes, faults, who may use them, what is left behind. And the data structures over them."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardlab.backends.stream import direct
from shardlab.backends.stream.boundaries import Boundaries
from shardlab.backends.stream.direct import DirectFile, aligned
from shardlab.backends.stream.layout import PAD, Segment, lay_out, overlaps, pieces, runs
from shardlab.errors import UserError
from shardlab.model.shape import model_shape
from shardlab.model.trainable import make_trainable
from tests.backends.stream.support import Case, kept, running, window
from tests.model.families import CONFIGS, build


def crash(directory: Path) -> None:
    """Leave the files of a run behind, as a kill does."""
    child = os.fork()
    if child == 0:
        try:
            with running(Case(), directory=directory) as engine:
                engine.run_window(window(0), 1e-2)
                os._exit(0)
        finally:
            os._exit(1)  # never on into pytest, whose copy this is
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("without_direct", [False, True])
def test_what_is_written_is_read(tmp_path: Path, without_direct: bool) -> None:
    """Also where a filesystem refuses O_DIRECT."""
    real = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    with mock.patch.object(direct.os, "open", refuse if without_direct else real):
        file = DirectFile(tmp_path / "a", 4 * PAD * 4, create=True)
        assert file.direct is False or not without_direct
        data = aligned(PAD).copy_(torch.arange(PAD))
        file.write(data, PAD * 4)
        file.sync()
        file.close()
        file = DirectFile(tmp_path / "a", 4 * PAD * 4, create=False)
    into = aligned(2 * PAD)
    file.read(into, 0)
    assert torch.equal(into, torch.cat([torch.zeros(PAD), torch.arange(PAD).float()]))
    assert torch.equal(file.mapped(PAD * 4, PAD, torch.float32), data)
    file.close()


def test_a_file_cut_short_is_told(tmp_path: Path) -> None:
    crash(tmp_path / "state")
    victim = tmp_path / "state/state-00002"
    os.truncate(victim, victim.stat().st_size - 100)
    with pytest.raises(UserError, match=r"state-00002 has \d+ bytes and should have \d+.*checkpoint"):
        running(Case(), directory=tmp_path / "state", resume=True).__enter__()
    victim.unlink()
    with pytest.raises(UserError, match="state-00002 is missing"):
        running(Case(), directory=tmp_path / "state", resume=True).__enter__()


def test_a_file_cut_short_while_in_use_is_told(tmp_path: Path) -> None:
    with running(Case(), directory=tmp_path / "state") as engine:
        os.truncate(tmp_path / "state/state-00003", 0)
        with pytest.raises(UserError, match="state-00003 ends at byte 0"):
            engine.run_window(window(0), 1e-2)


def test_the_files_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    crash(tmp_path / "state")
    before = sorted(path.name for path in (tmp_path / "state").iterdir())
    with pytest.raises(UserError, match=r"is not empty.*another run"):
        running(Case(), directory=tmp_path / "state").__enter__()
    with pytest.raises(UserError, match=r"of another run \(its precision"):
        running(Case(precision="bf16"), directory=tmp_path / "state", resume=True).__enter__()
    with pytest.raises(UserError, match=r"of another run \(its tensors"):
        running(Case("qwen3"), directory=tmp_path / "state", resume=True).__enter__()
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == before


def test_two_jobs_do_not_share_a_directory(tmp_path: Path) -> None:
    with running(Case(), directory=tmp_path / "state") as engine:
        with pytest.raises(UserError, match="in use by another job"):
            running(Case(), directory=tmp_path / "state").__enter__()
        engine.run_window(window(0), 1e-2)


def test_a_full_disk_is_told_before_anything_is_done(tmp_path: Path) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(direct.os, "posix_fallocate", full),
        pytest.raises(UserError, match=r"disk full: .*state-00000 needs .* GiB"),
    ):
        running(Case(), directory=tmp_path / "state").__enter__()
    assert not (tmp_path / "state").exists()
    usage = mock.Mock(free=1000)
    with (
        mock.patch("shutil.disk_usage", return_value=usage),
        pytest.raises(UserError, match=r"disk full: the training state needs .* GiB.*has 0.00 GiB"),
    ):
        running(Case(), directory=tmp_path / "state").__enter__()
    assert not (tmp_path / "state").exists()


def test_a_directory_that_was_there_stays_and_a_made_one_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name, there in (("mine", True), ("made", False)):
        with running(Case(activation_bytes=0), directory=tmp_path / name) as engine:
            engine.run_window(window(0), 1e-2)
            assert (tmp_path / name / "activations").exists()
        assert (tmp_path / name).exists() is there
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_the_disk_takes_is_what_is_said(tmp_path: Path) -> None:
    with running(Case("tied llama", rows_elements=512), directory=tmp_path / "state") as engine:
        store = engine._store
        trained = sum(segment.trained for segment in store.layout.segments)
        sizes = {segment.trained for segment in store.layout.segments}
        assert kept(engine, tmp_path / "state") == 16 * trained + 12 * sum(sizes)


@pytest.mark.parametrize("family", ["llama", "tied llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("rows", [None, 300, 512, 32])
def test_every_element_has_one_place(family: str, rows: int | None) -> None:
    shape = model_shape(make_trainable(build(CONFIGS[family]())))
    layout = lay_out(shape, rows_elements=rows)
    counts = {p.name: torch.zeros(p.numel, dtype=torch.int) for p in shape.parameters}
    for segment in layout.segments:
        assert segment.trained % PAD == segment.frozen % PAD == 0
        taken = torch.zeros(segment.elements, dtype=torch.int)
        for part in segment.parts:
            taken[segment.place(part)] += 1
            counts[part.name][part.start : part.start + part.numel] += 1
        assert (taken <= 1).all()
    assert all((count == 1).all() for count in counts.values())
    assert layout.tied is (family != "llama")
    assert len(layout.table) == 1 if rows is None else len(layout.table) > 1


def test_runs_and_overlaps_cover_a_plane() -> None:
    shape = model_shape(make_trainable(build(CONFIGS["gpt2"]())))
    segment: Segment = lay_out(shape).segments[-2]
    keys = {part.name: number // 3 for number, part in enumerate(segment.parts)}
    found = list(runs(segment, keys))
    assert [start for start, _, _ in found] == [0, *(stop for _, stop, _ in found[:-1])]
    assert found[-1][1] == segment.trained
    covered = 0
    for start, stop in pieces(segment.trained, PAD):
        for part, where, first in overlaps(segment, start, stop, trained=True):
            assert start + where.start - part.offset == first - part.start
            covered += where.stop - where.start
    assert covered == sum(part.numel for part in segment.parts)


@pytest.mark.parametrize("limit", [None, 0, 1000, 5 * 400, 10**9])
def test_inputs_come_back(tmp_path: Path, limit: int | None) -> None:
    """Two micro-batches of unlike shape, over two windows, the second larger."""
    boundaries = Boundaries(tmp_path / "activations", blocks=7, limit_bytes=limit)
    for width in (5, 11):
        given = [[torch.randn(2, 5, width), torch.randn(1, 3, width)] for _ in range(7)]
        for number, hidden in enumerate(given):
            boundaries.put(number, hidden)
        for number in reversed(range(7)):
            back = boundaries.take(number, ahead=number > 0)
            assert all(torch.equal(a, b) for a, b in zip(back, given[number], strict=True))
        boundaries.clear()
    boundaries.close()
    assert (tmp_path / "activations").exists() is (limit in (0, 1000, 2000))
    assert (boundaries.bytes_moved > 0) is (limit in (0, 1000, 2000))
