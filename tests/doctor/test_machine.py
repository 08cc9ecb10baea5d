"""The doctor's checks of a machine: what is well, what is not, and what to do about it."""

import io
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardlab.doctor import locks, report, selftest, system
from shardlab.doctor.check import Check
from shardlab.doctor.ranks import Ended, RankJob
from tests.train.support import JOB_VARIABLE, job_processes, shardlab


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_is_well() -> None:
    checks = by_name(list(system.check_system()))
    assert {"python", "torch", "accelerate", "deepspeed", "transformers", "devices", "memory", "compiler", "ninja",
            "ports"} <= set(checks)  # fmt: skip
    assert [check.line() for check in checks.values() if check.status == "failed"] == []


def test_a_version_that_is_too_old_has_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.importlib.metadata, "version", lambda name: "1.14.9")
    check = system._package("accelerate")
    assert check.status == "failed"
    assert check.found == "1.14.9, and 1.15 is the oldest supported"
    assert check.fix == "pip install 'accelerate>=1.15'"


def test_versions_are_compared_as_numbers() -> None:
    assert system._numbers("0.19.10") > system._numbers("0.19.8")
    assert system._numbers("2.13.0+cpu") == (2, 13, 0)


def test_a_machine_without_a_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1279: what is missing is named, with who needs it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = system._compiler()
    assert check.status == "warning"
    assert "no C++ compiler (c++)" in check.found
    assert check.fix == "install g++ or set CXX"


def test_a_memory_limit_below_what_two_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "host_memory_bytes", lambda: 2**30)
    check = system._memory()
    assert check.status == "failed"
    assert "by the cgroup's limit" in check.found


def test_a_default_port_that_is_taken_is_a_warning() -> None:
    import socket

    try:
        server = socket.create_server(("127.0.0.1", system._DEFAULT_PORT))
    except OSError:
        pytest.skip("the port is taken already")
    with server:
        assert system._port().status == "warning"


# Locks. https://github.com/pytorch/pytorch/issues/189245


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "SHARDLAB_CACHE": str(tmp_path / "ours"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "users"),
    }


@pytest.mark.parametrize(
    "place",
    [
        "users/cpu_adam/lock",
        "cache/torch_extensions/py311_cpu/deepspeed_shm_comm/lock",
        "ours/extensions/py311-torch2-ds0/cpu_adam/lock",
    ],
)
def test_a_stale_lock_is_named_with_how_to_clear_it(
    place: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever builds are made: the user's directory, torch's default, ours.

    https://github.com/deepspeedai/DeepSpeedExamples/issues/302, https://github.com/huggingface/transformers/issues/26015
    """
    lock = tmp_path / place
    lock.parent.mkdir(parents=True)
    lock.touch()
    now = lock.stat().st_mtime + 100
    monkeypatch.setattr(locks.time, "time", lambda: now)
    (check,) = locks.check_locks(environment)
    assert check.status == "failed"
    assert check.found.startswith(f"{lock} is 100 s old and no process here holds it")
    assert check.fix.endswith(f"rm '{lock}'")


def test_a_lock_that_a_live_builder_holds_is_well(environment: dict[str, str], tmp_path: Path) -> None:
    lock = tmp_path / "users/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        (check,) = locks.check_locks(environment)
    assert check.status == "ok"
    assert "a process is building there" in check.found


def test_without_a_lock_it_says_where_it_has_looked(environment: dict[str, str], tmp_path: Path) -> None:
    (check,) = locks.check_locks(environment)
    assert check.status == "ok"
    assert str(tmp_path / "users") in check.found


# The two-rank self-test.


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_every_backend_takes_one_step() -> None:
    """https://github.com/pytorch/pytorch/issues/162338: a reduce-scatter that sums where it should average."""
    checks = list(selftest.check_backends())
    assert [check.name for check in checks] == [f"{name}, 2 ranks" for name in ("collectives", *selftest.BACKENDS)]
    assert [check.line() for check in checks if check.status != "ok"] == []


def test_a_backend_that_computes_something_else_fails() -> None:
    reference = {"loss": 4.0, "grad_norm": 2.0, "seconds": 1.0}
    assert selftest._judge("fsdp", reference, reference).status == "ok"
    doubled = selftest._judge("fsdp", reference | {"grad_norm": 4.0}, reference)
    assert doubled.status == "failed"
    assert "grad_norm of the first step is 4.000000" in doubled.found
    assert selftest._judge("fsdp", reference | {"loss": float("nan")}, reference).status == "failed"


def test_without_deepspeed_the_others_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what is missing and what to use instead."""
    monkeypatch.setattr(selftest, "zero_unavailable_reason", lambda: "DeepSpeed is not installed: pip install it")
    monkeypatch.setattr(
        selftest, "_run", lambda names, timeout: iter(({"loss": 1.0, "grad_norm": 1.0, "seconds": 0},) * 3)
    )
    checks = list(selftest.check_backends())
    assert checks[0].line() == "✗ zero1, zero2, zero3: DeepSpeed is not installed: pip install it"
    assert len(checks) == 4


def test_a_backend_that_fails_is_not_in_the_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(names: list[str], timeout: float) -> Iterator[Any]:
        for name in names:
            if name == "zero1":
                yield Ended(1, "rank 0 failed:\n  trace\nRuntimeError: no gloo")
                return
            yield {"loss": 1.0, "grad_norm": 1.0, "seconds": 0.0}

    monkeypatch.setattr(selftest, "_run", run)
    statuses = {check.name.partition(",")[0]: check for check in selftest.check_backends()}
    assert [name for name, check in statuses.items() if check.status == "failed"] == ["zero1"]
    assert statuses["zero1"].found == "RuntimeError: no gloo"
    assert statuses["zero3"].status == "ok"


def test_the_cause_is_the_exception_in_one_line() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: 1 error\nkey\n  Extra'
    )
    assert Ended(1, f"rank 0 failed:\n{trace}").cause == "ValueError: 1 error key Extra"
    assert Ended(2, "error: mend this").cause == "error: mend this"
    assert Ended(1, "").cause == "exit code 1"


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    name = uuid.uuid4().hex
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with mock.patch.dict(os.environ, {JOB_VARIABLE: name}), RankJob("sleeper", [], nproc=2, timeout_seconds=12) as job:
        ended = job.wait()
    assert ended.code is None
    assert ended.cause == "no end within 12 s"
    deadline = time.monotonic() + 60
    while job_processes(name) and time.monotonic() < deadline:
        time.sleep(0.1)  # a killed process is gone when the kernel gets to it
    assert job_processes(name) == []


def test_the_command_prints_a_line_for_each_check() -> None:
    program = [sys.executable, "-m", "shardlab", "doctor", "--no-self-test"]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == (1 if "FAIL" in done.stdout else 0)
    assert all(line[:4] in ("ok  ", "warn", "FAIL") for line in done.stdout.splitlines())
    lines: list[str] = []
    with mock.patch.object(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        code = report.examine(self_test=False, as_json=False, say=lines.append)
    assert code == done.returncode
    assert len(lines) == len(done.stdout.splitlines())
    assert all(line[0] in "✓!✗" for line in lines)
    (as_json,) = shardlab("doctor", "--no-self-test", "--json").out.splitlines()
    assert {"name", "status", "found", "fix"} == set(json.loads(as_json)["checks"][0])
