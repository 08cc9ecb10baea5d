"""bench/data.py at its smallest: it runs, reports in the form, and its contestants make the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tokenising_beside_peers() -> None:
    command = [sys.executable, "bench/data.py", "--megabytes", "1", "--vocabulary", "1024", "--repeats", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=580)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 5
    tokens = [row["tokens"] for row in rows]
    assert max(tokens) - min(tokens) < 5 * 512  # peers drop what does not fill a row, one of them in each batch
    assert all(row["CPU s"] > 0 and row["peak MiB"] >= 0 for row in rows)
