"""Building DeepSpeed's extensions: locks with and without a builder, compilers that are missing or too slow."""

import fcntl
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest

from shardlab.errors import UserError
from shardlab.runtime import extensions
from shardlab.runtime.extensions import CPU_ADAM, SHM_COMM, extensions_dir, prebuild, zero_unavailable_reason


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our own directory for extensions, empty."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    return extensions_dir()


@pytest.fixture
def users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TORCH_EXTENSIONS_DIR that the user has set."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "users"))
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "users"


def put_built(directory: Path, name: str = SHM_COMM) -> Path:
    """What a whole build leaves, and return the path of torch's lock for it."""
    (directory / name).mkdir(parents=True)
    library = directory / name / f"{name}.so"
    library.touch()
    (directory / name / extensions._MARKER).write_text(str(library))
    return directory / name / "lock"


def test_built_is_not_built_again(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_built(own_directory)
    monkeypatch.setattr(extensions, "_build", lambda *_: pytest.fail("it builds"))
    prebuild([SHM_COMM])


def test_stale_lock_in_our_directory_is_removed(own_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """https://github.com/pytorch/pytorch/issues/189245: a killed build's lock stops every later start in silence."""
    lock = put_built(own_directory)
    lock.touch()
    prebuild([SHM_COMM], timeout_seconds=20)
    assert not lock.exists()
    assert capfd.readouterr().err == f"removing {lock}: a build that was killed left it\n"


def test_lock_that_a_builder_holds_is_respected(own_directory: Path) -> None:
    """A program that only uses DeepSpeed may be building in the same directory."""
    lock = put_built(own_directory)
    with lock.open("w"), pytest.raises(UserError, match="a process still holds it"):
        prebuild([SHM_COMM], timeout_seconds=0.5)
    assert lock.exists()


def test_lock_in_the_users_directory_is_named(users_directory: Path) -> None:
    """https://github.com/huggingface/transformers/issues/26015: an empty `lock`, and start-up hangs."""
    lock = users_directory / SHM_COMM / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with pytest.raises(UserError, match=f"rm '{lock}'"):
        prebuild([SHM_COMM], timeout_seconds=1)
    assert lock.exists()


def test_one_process_builds_at_a_time(own_directory: Path) -> None:
    own_directory.mkdir(parents=True)
    with (own_directory / "shardlab.flock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process has been building"):
            prebuild([SHM_COMM], timeout_seconds=0.5)


def test_missing_compiler_is_one_line(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/943: say what is missing, not a traceback of the build."""
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    reason = zero_unavailable_reason()
    assert reason is not None
    assert "no C++ compiler (no-such-compiler)" in reason
    assert "\n" not in reason
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        prebuild([SHM_COMM, CPU_ADAM])
    assert zero_unavailable_reason(names=()) is None
    put_built(own_directory)
    assert zero_unavailable_reason() is None  # built: nothing to compile


def test_build_that_is_killed_or_too_slow_leaves_nothing(
    own_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/PASSIONLab/OpenEquivariance/issues/207: no compiler lives on, and no lock stays."""
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        'case "$*" in *" -c "*) echo $$ > part; mv part pid; exec sleep 600;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build = subprocess.Popen(
        [sys.executable, "-c", f"from shardlab.runtime.extensions import *; prebuild(['{SHM_COMM}'])"],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists():
        assert build.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    build.kill()  # the harder way to go than a time-out: nothing can be tidied up
    build.wait()
    running = psutil.Process(int((tmp_path / "pid").read_text()))
    gone, _ = psutil.wait_procs([running], timeout=20)
    assert gone or running.status() == psutil.STATUS_ZOMBIE
    assert (own_directory / SHM_COMM / "lock").exists()

    with pytest.raises(UserError, match="not built within the start-up limit"):
        prebuild([SHM_COMM], timeout_seconds=1)
    assert not (own_directory / SHM_COMM / "lock").exists()


@pytest.mark.slow
def test_build(
    own_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Built, loaded and marked by DeepSpeed's builder; of a source of some lines: its own take a minute."""
    source = tmp_path / "small.cpp"
    source.write_text(
        "#include <Python.h>\n"
        f"#pragma weak PyInit_{SHM_COMM}\n"  # it stands for each of the builder's sources
        f'static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{SHM_COMM}"}};\n'
        f"PyMODINIT_FUNC PyInit_{SHM_COMM}(void) {{ return PyModule_Create(&module); }}\n"
    )
    compiler = tmp_path / "compiler-of-that"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *" -c "*) ;; *) exec c++ "$@";; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'exec c++ -fPIC -I{sysconfig.get_path("include")} -c {source} -o "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    prebuild([SHM_COMM])
    assert capfd.readouterr().err.startswith("building DeepSpeed extension shm_comm (once")
    assert (own_directory / SHM_COMM / f"{SHM_COMM}.so").exists()
    prebuild([SHM_COMM])
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_build_that_fails_names_the_cause(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UserError, match=r"did not build \(.*'false'.*build.log"):
        prebuild([SHM_COMM])


def test_importing_is_light() -> None:
    """A start with everything built must not import torch or DeepSpeed to find that out."""
    code = "import sys, shardlab.runtime.extensions, shardlab.runtime.child; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
