"""Where DeepSpeed's extensions are kept, and what is said where there is no DeepSpeed."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.runtime import extensions
from shardlab.runtime.extensions import extensions_dir, zero_unavailable_reason


def test_the_users_directory_wins(tmp_path: Path) -> None:
    assert extensions_dir({"TORCH_EXTENSIONS_DIR": "/users", "SHARDLAB_CACHE": str(tmp_path)}) == Path("/users")


def test_ours_is_another_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built for another torch crashes, or worse."""
    ours = extensions_dir({"SHARDLAB_CACHE": str(tmp_path)})
    assert ours.parent == tmp_path / "extensions"
    assert ours == extensions_dir({"SHARDLAB_CACHE": str(tmp_path), "TORCH_EXTENSIONS_DIR": ""})
    monkeypatch.setattr(extensions.importlib.metadata, "version", lambda name: "9.9.9")
    assert extensions_dir({"SHARDLAB_CACHE": str(tmp_path)}) != ours


def test_without_deepspeed_there_is_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zero_unavailable_reason() is None
    monkeypatch.setattr(extensions.importlib.util, "find_spec", lambda name: None)
    reason = zero_unavailable_reason()
    assert reason is not None
    assert "pip install deepspeed" in reason
    assert "shard.backend: fsdp" in reason


def test_importing_is_light() -> None:
    """A rank's own code must not import torch before the environment is set."""
    code = "import sys, shardlab.runtime.extensions, shardlab.runtime.child; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
