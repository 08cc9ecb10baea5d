"""What a run says while it goes."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardlab.train import metrics
from shardlab.train.metrics import MetricsFile, Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes when a test says so."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_rows_are_there_when_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": 2.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}
    file.write({"step": 2, "loss": None})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1] == '{"step": 2, "loss": null}'


@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_values_that_json_has_no_number_for_are_spelled(tmp_path: Path, value: float, name: str) -> None:
    """The true value, in a file that every JSON reader takes."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"loss": value, "skipped": True})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == f'{{"loss": "{name}", "skipped": true}}\n'


def test_a_log_has_plain_lines_now_and_then(clock: SimpleNamespace) -> None:
    log = io.StringIO()
    progress = Progress(40, log)
    for step in range(1, 41):
        clock.now += 1.0
        progress.step(step, 1.0, 100.0, 1 << 30)
    lines = log.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "11/40", "21/40", "31/40", "40/40"]
    assert lines[0] == "step 1/40  loss 1.0000  100 tokens/s  peak 1.00 GiB  0:39 left"
    assert lines[-1].endswith("0:00 left")
    assert "\r" not in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_a_terminal_has_one_line_that_changes(clock: SimpleNamespace) -> None:
    terminal = Terminal()
    progress = Progress(3, terminal)
    progress.step(1, 1.0, 100.0, 0)
    progress.step(2, None, 100.0, 0)
    assert terminal.getvalue().count("\r\x1b[Kstep") == 2
    assert "\n" not in terminal.getvalue()
    assert "loss -  " in terminal.getvalue(), "a step without a single target has no loss, and 0 would be a lie"
    progress.note("a word in between")
    assert terminal.getvalue().endswith("\r\x1b[Ka word in between\n")
    progress.step(3, 1.0, 100.0, 0)
    assert terminal.getvalue().endswith("left\n"), "what comes after starts on a line of its own"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (123, "2:03"), (3723, "1:02:03")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
