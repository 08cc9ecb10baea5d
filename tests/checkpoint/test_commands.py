"""`shardlab checkpoint list|inspect|verify|diff` on checkpoints cut in different ways."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardlab.checkpoint import Contents, Saver
from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.state.fragment import MASTER, OptimizerState
from tests.checkpoint.support import small_state, whole_fragments


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and stdout; a UserError is raised (`main` makes it one line and code 2)."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run with steps 1 and 2."""
    saver = Saver(tmp_path / "checkpoints", file_bytes=700)
    optimizer = OptimizerState(
        ("exp_avg",), {"model.embed.weight": {"step": 1.0}}, ({"names": ["model.embed.weight"]},)
    )
    for step in (1, 2):
        contents = Contents(
            step=step,
            optimizer=optimizer,
            aliases={"lm_head.weight": "model.embed.weight"},
            plan={"backend": "zero3", "world_size": 2},
            evaluation=3.0 - step,
            versions={"shardlab": "0.1.0"},
            parent="elsewhere" if step == 1 else None,
        )
        saver.save(contents, whole_fragments(small_state(step)))
    return tmp_path


def test_list(two: Path) -> None:
    (two / "checkpoints" / "step-00000001" / "manifest.json").write_text("{")
    code, text = run("list", two)
    assert code == 0
    damaged, whole = text.splitlines()
    assert damaged.startswith("step-00000001  DAMAGED: ")
    assert whole == "step-00000002  0.0 MiB  zero3 on 2  evaluation 1.0000"
    rows = json.loads(run("list", two, "--json")[1])
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["bytes"] > 2570
    with pytest.raises(UserError, match="holds no checkpoint"):
        run("list", two / "nothing")


def test_inspect(two: Path) -> None:
    code, text = run("inspect", two / "checkpoints" / "step-00000001")
    assert code == 0
    for expected in (
        "step 1, 0.0 MiB",
        "goes on from elsewhere",
        "shardlab 0.1.0",
        "evaluation loss 2.0000",
        "master: 2 tensors, 325 elements",
        "plan: backend zero3, world_size 2",
        "lm_head.weight is tied to model.embed.weight",
        "  model.embed.weight  exp_avg  [40, 8]  F32  2 pieces",
        "  model.norm.weight  master  [5]  BF16  1 piece\n",
    ):
        assert expected in text
    values = json.loads(run("inspect", two, "--json")[1])
    assert values["step"] == 2
    assert values["optimizer"]["scalars"] == {"model.embed.weight": {"step": 1.0}}
    assert {entry["name"] for entry in values["tensors"]} == {"model.embed.weight", "model.norm.weight"}
    with pytest.raises(UserError, match="is not a checkpoint"):
        run("inspect", two / "..")
    with pytest.raises(UserError, match="not a directory"):
        run("inspect", two / "nothing")


def test_verify(two: Path) -> None:
    code, text = run("verify", two)
    assert code == 0
    assert [line.rpartition(": ")[2] for line in text.splitlines()] == ["whole", "whole"]
    one = two / "checkpoints" / "step-00000001"
    (one / "rank-00000-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 2 checkpoints damaged: .*00001\.safetensors is missing") as raised:
        run("verify", two)
    assert "\n" not in str(raised.value)
    assert run("verify", two / "checkpoints" / "step-00000002")[0] == 0
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(two), "--json"])
    assert [len(row["faults"]) for row in json.loads(done.stdout)] == [1, 0]


def test_diff_does_not_mind_how_they_are_cut(two: Path) -> None:
    other = Saver(two / "other").save(
        Contents(
            step=1,
            optimizer=OptimizerState(
                ("exp_avg",), {"model.embed.weight": {"step": 1.0}}, ({"names": ["model.embed.weight"]},)
            ),
            aliases={"lm_head.weight": "model.embed.weight"},
        ),
        whole_fragments(small_state(1)),
    )
    assert run("diff", two / "checkpoints" / "step-00000001", other) == (0, "the same, bit for bit\n")


def test_diff_names_what_differs_and_by_how_much(tmp_path: Path) -> None:
    left = {
        ("a", MASTER): torch.arange(2_000_000.0),
        ("b", MASTER): torch.ones(3),
        ("c", MASTER): torch.ones(3),
        ("d", MASTER): torch.ones(3),
        ("e", MASTER): torch.tensor([1.0, torch.nan]),
        ("f", MASTER): torch.tensor([torch.nan]),
    }
    right = {
        ("a", MASTER): left["a", MASTER].clone(),
        ("b", MASTER): torch.ones(4),
        ("c", MASTER): torch.ones(3, dtype=torch.float64),
        ("d", "exp_avg"): torch.ones(3),
        ("e", MASTER): torch.tensor([1.0, 2.0]),
        ("f", MASTER): torch.tensor([torch.nan]),
    }
    right["a", MASTER][1_500_000] += 4
    first = Saver(tmp_path / "1").save(Contents(step=1), whole_fragments(left))
    second = Saver(tmp_path / "2").save(Contents(step=2), whole_fragments(right))
    code, text = run("diff", first, second)
    assert code == 1
    step, a, b, c, d, e, other = text.splitlines()
    assert step == "step: 1 and 2"
    assert a.startswith("a (master): 1 of 2,000,000 elements differ, by up to 4 (relative L2 2.4")
    assert b == "b (master): shape [3] and [4]"
    assert c == "c (master): dtype F32 and F64; 0 of 3 elements differ, by up to 0 (relative L2 0.00e+00)"
    assert d == f"d (master): only in {first}"
    assert e.startswith("e (master): 1 of 2 elements differ, by up to inf")
    assert other == f"d (exp_avg): only in {second}"
    found = json.loads(run("diff", first, second, "--json")[1])
    assert [row["name"] for row in found] == ["step", "a", "b", "c", "d", "e", "d"]
    assert found[1]["largest"] == 4
    assert found[5]["largest"] == "inf"
