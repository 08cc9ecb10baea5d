"""Damage of every kind is named and refused, and the newest whole checkpoint is used. Field cases B41 and B45."""

import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from shardlab.checkpoint import (
    CheckpointReader,
    Contents,
    DamagedError,
    Ranks,
    Saver,
    find_newest,
    read_manifest,
    verify,
    verify_together,
)
from shardlab.checkpoint.manifest import MANIFEST
from shardlab.errors import UserError
from tests.checkpoint.support import on_ranks, small_state, succeed, whole_fragments


def save(root: Path, *steps: int, file_bytes: int = 1000) -> Path:
    """Save those steps; the last one's directory."""
    saver = Saver(root, keep=9, file_bytes=file_bytes)
    return [saver.save(Contents(step=step), whole_fragments(small_state(step))) for step in steps][-1]


def first_file(path: Path) -> Path:
    return path / read_manifest(path).files[0].name


def flip(file: Path, at: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda file: flip(file, file.stat().st_size - 5), "content is not what was written"),
    "a flipped bit of the header": (lambda file: flip(file, 30), "header"),
    "a byte cut": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes; by the manifest it has"),
    "a byte more": (lambda file: file.write_bytes(file.read_bytes() + b"!"), "bytes; by the manifest it has"),
    "missing": (lambda file: file.unlink(), "is missing"),
    "empty": (lambda file: os.truncate(file, 0), "is empty"),
    "another checkpoint's": (
        lambda file: file.write_bytes((file.parents[1] / "step-00000001" / file.name).read_bytes()),
        "content is not what was written",
    ),
    "a link": (lambda file: (file.rename(file.parents[2] / "away"), file.symlink_to(file.parents[2] / "away")), "link"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "is not a file"),
    "a directory": (lambda file: (file.unlink(), file.mkdir()), "is not a file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_newest_whole_one_is_used(tmp_path: Path, damage: str) -> None:
    """https://github.com/vllm-project/speculators/pull/739, https://github.com/huggingface/transformers/pull/40790"""
    root = tmp_path / "checkpoints"
    newest = save(root, 1, 2, 3)
    file = first_file(newest)
    act, said = DAMAGES[damage]
    act(file)
    with pytest.raises(UserError, match=said) as raised:
        verify(newest)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
    lines: list[str] = []
    assert find_newest(root, say=lines.append) == root / "step-00000002"
    assert len(lines) == 1
    assert "step-00000003 is damaged and not used" in lines[0]
    assert file.name in lines[0]


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    newest = save(tmp_path, 1, 2)
    (newest / "rank-00007-00000.safetensors").write_bytes(first_file(newest).read_bytes())
    with pytest.raises(DamagedError, match=r"rank-00007-00000\.safetensors is not part of this checkpoint"):
        verify(newest)


def test_any_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    newest = save(tmp_path, 1)
    manifest = newest / MANIFEST
    whole = manifest.read_bytes()
    for at in range(0, len(whole), 7):
        flip(manifest, at, bit=at % 8)
        with pytest.raises(UserError):
            read_manifest(newest)
        manifest.write_bytes(whole)
    read_manifest(newest)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04.", b'{"xxh3_128":"' + b"0" * 32 + b'",\n"step":1}'])
def test_what_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    newest = save(tmp_path, 1)
    (newest / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedError, match=MANIFEST):
        CheckpointReader(newest)


def test_a_directory_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="not a checkpoint, or not a whole one"):
        verify(tmp_path)


def test_without_any_whole_one_the_user_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_newest(tmp_path)
    first_file(save(tmp_path, 1)).unlink()
    lines: list[str] = []
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: step-00000001 damaged"):
        find_newest(tmp_path, say=lines.append)
    assert len(lines) == 1


def test_each_rank_reads_a_share_and_all_learn_of_the_damage(tmp_path: Path) -> None:
    newest = save(tmp_path, 1, 2, file_bytes=700)
    files = read_manifest(newest).files
    (newest / files[1].name).unlink()
    lines: list[str] = []
    found = on_ranks(2, lambda ranks: find_newest(tmp_path, ranks, lines.append))
    assert found == [tmp_path / "step-00000001"] * 2
    assert len(lines) == 1  # the first rank's

    def check(ranks: Ranks) -> None:
        verify_together(newest, ranks)

    raised = on_ranks(2, check)
    assert all(isinstance(error, DamagedError) and files[1].name in str(error) for error in raised)


# --- hostile manifests: well hashed, so only the checks stand between them and the reader


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and hash it anew."""
    values = json.loads((path / MANIFEST).read_bytes())
    del values["xxh3_128"]
    change(values)
    rest = json.dumps(values).encode()[1:]
    digest = xxhash.xxh3_128_hexdigest(rest).encode()
    (path / MANIFEST).write_bytes(b'{"xxh3_128":"' + digest + b'",\n' + rest)


def _piece(values: dict[str, Any]) -> list[Any]:
    piece: list[Any] = values["tensors"][0]["pieces"][0]
    return piece


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "up": (lambda v: v["files"][0].update(name="../secret.safetensors"), "not a plain name"),
    "absolute": (lambda v: v["files"][0].update(name="/etc/secret.safetensors"), "not a plain name"),
    "nul": (lambda v: v["files"][0].update(name="a\0.safetensors"), "not a plain name"),
    "another kind of file": (lambda v: v["files"][0].update(name="optimizer.pt"), "not a plain name"),
    "twice": (lambda v: v["files"].append(v["files"][0]), "listed twice"),
    "huge shape": (lambda v: v["tensors"][0].update(shape=[2**60, 8]), "missing"),
    "huge box": (
        lambda v: (v["tensors"][0].update(shape=[2**60, 8]), _piece(v).__setitem__(3, [2**60, 8])),
        "beyond the end",
    ),
    "huge file": (lambda v: v["files"][0].update(bytes=2**60), "by the manifest it has"),
    "more than its pieces": (lambda v: v["tensors"].pop(0), "says nothing of a part"),
    "beyond the end": (lambda v: _piece(v).__setitem__(1, 10**6), "beyond the end"),
    "into the header": (lambda v: _piece(v).__setitem__(1, 0), "one after another"),
    "outside the shape": (lambda v: _piece(v).__setitem__(2, [39, 0]), "not inside its shape"),
    "negative": (lambda v: _piece(v).__setitem__(2, [-1, 0]), "greater than or equal to 0"),
    "empty box": (lambda v: _piece(v).__setitem__(3, [0, 8]), "a box at"),
    "no such file": (lambda v: _piece(v).__setitem__(0, 99), "lies in file 99"),
    "overlap": (lambda v: v["tensors"][0]["pieces"].append(_piece(v)), "there twice"),
    "element missing": (lambda v: v["tensors"][0]["pieces"].pop(0), "missing"),
    "tensor twice": (lambda v: v["tensors"].append(v["tensors"][0]), "listed twice"),
    "other dtype": (lambda v: v["tensors"][0].update(dtype="I32"), "header"),
    "unknown dtype": (lambda v: v["tensors"][0].update(dtype="PICKLE"), "not known"),
    "unknown encoding": (lambda v: v["tensors"][0].update(encoding="pickle"), "encoding"),
    "unknown key": (lambda v: v.update(run="rm"), "run"),
    "alias of nothing": (lambda v: v["aliases"].update(head="nothing"), "can't be"),
    "many dims": (lambda v: v["tensors"][0].update(shape=[1] * 5000), "at most 32"),
    "version": (lambda v: v.update(version=99), "reads version 1"),
    "a string for a number": (lambda v: v.update(step="1"), "step"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_without_an_allocation(tmp_path: Path, case: str) -> None:
    change, said = HOSTILE[case]
    path = save(tmp_path, 1)
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    forge(path, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=said) as raised:
        verify(path)
    assert "\n" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize("hashed", [True, False])
def test_a_header_that_declares_2_to_the_60_bytes(tmp_path: Path, hashed: bool) -> None:
    """https://github.com/pytorch/torchtune/issues/1142; refused also where the manifest's hash is that of the file."""
    path = save(tmp_path, 1)
    file = first_file(path)
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])
    if hashed:
        digest = xxhash.xxh3_128_hexdigest(file.read_bytes())
        forge(path, lambda values: values["files"][0].update(xxh3_128=digest))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="header"):
        verify(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


class _Marker:
    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize(
    "name",
    ["rng_state.pth", "optimizer.pt", "training_args.bin", ".metadata", "zero_pp_rank_0_mp_rank_00.pt", MANIFEST],
)
def test_a_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    """https://github.com/huggingface/transformers/pull/43140"""
    path = save(tmp_path, 1)
    marker = tmp_path / "marker"
    (path / name).write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(DamagedError, match=name.replace(".", r"\.")):
        verify(path)
    with pytest.raises(UserError):
        find_newest(tmp_path, say=lambda line: None)
    assert not marker.exists()


def test_flips_at_random_places_are_all_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    random_ = random.Random(0)
    for name in os.listdir(path):
        whole = (path / name).read_bytes()
        for _ in range(15):
            flip(path / name, random_.randrange(len(whole)), random_.randrange(8))
            with pytest.raises(UserError, match=name):
                verify(path)
            (path / name).write_bytes(whole)
    succeed(on_ranks(1, lambda ranks: verify_together(path, ranks)))
