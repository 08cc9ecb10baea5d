"""A rank under someone else's launcher, or none: it says itself what ended it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.errors import UserError
from shardlab.runtime.failure import Ended, Report, classify, first_failure, read_report, write_report

RANK_ONE = {"RANK": "1", "WORLD_SIZE": "2"}


def run(body: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    code = f"""
import sys
from shardlab.errors import UserError
from shardlab.runtime import child
child.COLLECTIVE_DELAY_SECONDS = 0.1
def main():
    {body}
sys.exit(child.run_rank(main))
"""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_user_error_is_one_line() -> None:
    done = run("raise UserError('mend it')", {})
    assert (done.returncode, done.stderr) == (2, "error: mend it\n")


def test_other_ranks_say_which_they_are() -> None:
    done = run("raise UserError('mend it')", RANK_ONE)
    assert (done.returncode, done.stderr) == (2, "[rank 1] error: mend it\n")


def test_traceback_comes_once_and_output_is_flushed() -> None:
    done = run("print('before'); raise RuntimeError('Connection closed by peer')", RANK_ONE)
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert done.stderr.count("Traceback") == 1
    assert "\n[rank 1] RuntimeError: Connection closed by peer\n" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_lost_peer_is_said_whichever_collective_met_it(rank: str) -> None:
    """torch's messages of a failed collective don't say whose it was, and rank 0 has no prefix."""
    done = run("raise RuntimeError('Timed out waiting 20000ms for recv operation')", {**RANK_ONE, "RANK": rank})
    last = done.stderr.splitlines()[-1]
    assert f"rank {rank} lost another of the 2" in last


def test_an_own_failure_is_not_taken_for_a_lost_peer() -> None:
    done = run("raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')", RANK_ONE)
    assert "lost another" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [("return 7", 7), ("sys.exit(5)", 5), ("sys.exit()", 0), ("sys.exit('no')", 1), ("raise KeyboardInterrupt", 130)],
)
def test_exit_codes(body: str, code: int) -> None:
    done = run(body, RANK_ONE)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_kinds_of_failure() -> None:
    """gloo's errors are RuntimeErrors by type; those of torch's own layer have names. A wrapped one counts too."""
    dist_error = type("DistBackendError", (RuntimeError,), {})
    assert classify(dist_error("anything")) == "collective"
    assert classify(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")) == "collective"
    assert classify(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == "error"
    assert classify(ValueError("Connection closed by peer")) == "error"
    assert classify(UserError("gloo")) == "user"
    wrapped = ValueError("could not save")
    wrapped.__cause__ = dist_error("gone")
    assert classify(wrapped) == "collective"


def test_report_survives_the_file(tmp_path: Path) -> None:
    assert read_report(tmp_path / "error.json") is None
    write_report(tmp_path / "error.json", UserError("mend it"), 2)
    report = read_report(tmp_path / "error.json")
    assert report is not None
    assert (report.kind, report.message) == ("user", "mend it")


def test_consequences_are_not_first() -> None:
    """Ranks that ended within one look: a lost peer, an abort in a library, then by time."""
    lost = Ended(0, 1, Report("collective", "lost", "", 1.0))
    aborted = Ended(1, -6, None)
    late, early = Ended(2, 1, Report("error", "b", "", 3.0)), Ended(3, 1, Report("error", "a", "", 2.0))
    killed = Ended(4, -9, None)
    assert first_failure([lost, aborted, late, early]) == early
    assert first_failure([lost, early, killed]) == killed
    assert first_failure([lost, aborted]) == aborted
    assert killed.exit_code == 137
