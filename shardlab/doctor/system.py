"""The machine: versions, devices, memory, tools to compile with, ports."""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import psutil

from shardlab.doctor.check import Check
from shardlab.runtime.processes import path_with_tools
from shardlab.topology import core_count, host_memory_bytes

GIB = 1024**3
_VERSIONS = ("torch", "accelerate", "deepspeed", "transformers")
_DEFAULT_PORT = 29500  # of torchrun, accelerate and deepspeed
_LEAST_MEMORY = 2 * GIB  # the libraries take 0.4 GiB in each of two ranks
_LEAST_SHARED = GIB // 2


def check_system() -> Iterator[Check]:
    """All checks of the machine. Imports torch."""
    yield _python()
    yield from (_package(name) for name in _VERSIONS)
    yield _devices()
    yield _memory()
    yield _shared_memory()
    yield _compiler()
    yield _ninja()
    yield _port()


def _python() -> Check:
    found = platform.python_version()
    needed = importlib.metadata.metadata("shardlab")["Requires-Python"]
    least = needed.removeprefix(">=")
    ok = _numbers(found) >= _numbers(least)
    return Check("python", "ok" if ok else "failed", found, "" if ok else f"install Python {least} or newer")


def _package(name: str) -> Check:
    least = _least(name)
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "failed", "not installed", f"pip install '{name}>={least}'")
    if _numbers(found) < _numbers(least):
        return Check(name, "failed", f"{found}, and {least} is the oldest supported", f"pip install '{name}>={least}'")
    return Check(name, "ok", found)


def _least(name: str) -> str:
    """The oldest version that this package's own requirements allow."""
    for line in importlib.metadata.requires("shardlab") or ():
        match = re.fullmatch(rf"{name}\s*>=\s*([\d.]+)", line)
        if match:
            return match.group(1)
    return "0"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _devices() -> Check:
    import torch

    cores = f"{core_count()} CPU core{'s' if core_count() != 1 else ''}"
    if not torch.accelerator.is_available():
        return Check("devices", "ok", f"{cores}, no accelerator")
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    sizes = {torch.accelerator.get_memory_info(index)[1] for index in range(count)}
    memory = " or ".join(f"{size / GIB:.0f} GiB" for size in sorted(sizes))
    alone = "; there is one only, so the ranks below run on the CPU" if count == 1 else ""
    return Check("devices", "ok", f"{count} x {kind}, {memory} each, {cores}{alone}")


def _memory() -> Check:
    machine, limit = psutil.virtual_memory().total, host_memory_bytes()
    limited = f", by the cgroup's limit (the machine has {machine / GIB:.1f})" if limit < machine else ""
    found = f"{limit / GIB:.1f} GiB{limited}, {psutil.virtual_memory().available / GIB:.1f} GiB free"
    if limit < _LEAST_MEMORY:
        return Check("memory", "failed", found, f"raise the limit: two ranks need {_LEAST_MEMORY / GIB:.0f} GiB")
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check("shared memory", "ok", "not a file system here")
    found = f"/dev/shm has {size / GIB:.2f} GiB"
    if size < _LEAST_SHARED:
        fix = "data workers and NCCL fail on that (containers: --shm-size=8g)"
        return Check("shared memory", "warning", found, fix)
    return Check("shared memory", "ok", found)


def _compiler() -> Check:
    """No part of shardlab needs one; DeepSpeed's own CPU Adam and NVMe do."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    why = "only DeepSpeed's own extensions (its CPU Adam, NVMe) need it"
    if shutil.which(command[0]) is None:
        return Check("compiler", "warning", f"no C++ compiler ({command[0]}): {why}", "install g++ or set CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Check("compiler", "warning", f"Python's headers are missing: {why}", "install python3-dev")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    first = (done.stdout or done.stderr).splitlines()[:1]
    if done.returncode:
        return Check("compiler", "warning", f"{command[0]} does not run: {''.join(first)}", "install g++ or set CXX")
    return Check("compiler", "ok", "".join(first))


def _ninja() -> Check:
    found = shutil.which("ninja", path=path_with_tools(os.environ.get("PATH", os.defpath)))
    if found is None:
        why = "only DeepSpeed's own extensions need it"
        return Check("ninja", "warning", f"not found: {why}", "pip install ninja")
    return Check("ninja", "ok", found)


def _port() -> Check:
    """Ranks meet over TCP. Our launcher takes a free port; others take one by default."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            free = server.getsockname()[1]
    except OSError as error:
        return Check("ports", "failed", f"no port of the loopback can be opened: {error}", "look at the firewall")
    try:
        with socket.create_server(("127.0.0.1", _DEFAULT_PORT)):
            pass
    except OSError:
        found = f"{free} is free, but {_DEFAULT_PORT}, the default of torchrun, accelerate and deepspeed, is taken"
        return Check("ports", "warning", found, "give them another (--master-port), or use shardlab's --nproc")
    return Check("ports", "ok", f"{_DEFAULT_PORT} and others are free")
