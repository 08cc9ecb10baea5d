"""DeepSpeed's compiled extensions: where they are kept, and building them once, before ranks start.

Left to itself DeepSpeed compiles when a rank first needs an extension: inside the collectives' time-out, with every
other rank waiting, and a build that is killed leaves a `lock` file on which every later start waits in silence
(https://github.com/pytorch/pytorch/issues/189245). Here one process builds, in a directory of our own, and a lock
without a builder is found out.

Nothing here imports torch or DeepSpeed: once built, a start costs a few looks at the disk.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardlab.errors import UserError
from shardlab.runtime.processes import Guard, end_sessions, path_with_tools

SHM_COMM = "deepspeed_shm_comm"  # built at every first CPU start of DeepSpeed, unless `without_shm_comm` is called
CPU_ADAM = "cpu_adam"  # DeepSpeedCPUAdam, for an optimizer that is offloaded

_ABOUT = {SHM_COMM: "about a minute"}
_MARKER = "shardlab-built"  # in an extension's directory after a whole build; holds the library's path
_POLL_SECONDS = 0.2


def extensions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where extensions are built and loaded from: the user's TORCH_EXTENSIONS_DIR, or a directory of our own.

    Ours is keyed by all that a built library depends on: Python, torch, DeepSpeed, the installation and the CPU (a home
    directory may be shared by machines of several kinds).
    """
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    return cache_root(environment) / "extensions" / _key()


def prebuild(names: Sequence[str], *, timeout_seconds: float = 900.0) -> None:
    """Build those of the extensions (SHM_COMM, CPU_ADAM) that aren't there, in one other process.

    To be called before the ranks start, or in each rank before the process group is made: one builds, the others wait.
    `timeout_seconds` limits the whole: waiting for another build or a lock, and building.

    Raises UserError when something is missing, the build fails or takes too long, or a lock in the user's own
    TORCH_EXTENSIONS_DIR doesn't go away.
    """
    directory = extensions_dir()
    if all(_is_ready(directory / name) for name in names):
        return
    missing = zero_unavailable_reason(names)
    if missing is not None:
        raise UserError(missing)
    deadline = time.monotonic() + timeout_seconds
    directory.mkdir(parents=True, exist_ok=True)
    with _sole_builder(directory, deadline):
        pending = [name for name in names if not _is_ready(directory / name)]
        for name in pending:
            _clear_lock(directory / name / "lock", ours=directory.is_relative_to(cache_root()), deadline=deadline)
        pending = [name for name in pending if not _is_ready(directory / name)]
        if pending:
            _build(directory, pending, deadline)


def zero_unavailable_reason(names: Sequence[str] = (SHM_COMM,)) -> str | None:
    """Why DeepSpeed can't run here, in one line with what to do; None if it can. It only looks, and imports nothing.

    `names` are the extensions that it would need.
    """
    instead = "or use shard.backend: fsdp, which needs none"
    if importlib.util.find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed: `pip install deepspeed`, {instead}"
    if all((extensions_dir() / name / _MARKER).exists() for name in names):
        return None
    what = f"DeepSpeed has to compile {', '.join(names)} and"
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        return f"{what} there is no C++ compiler ({compiler}): install one (g++) or set CXX, {instead}"
    if shutil.which("ninja", path=path_with_tools(os.environ.get("PATH", os.defpath))) is None:
        return f"{what} there is no ninja: `pip install ninja`, {instead}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"{what} Python's headers are missing: install python3-dev, {instead}"
    return None


def without_shm_comm() -> None:
    """Tell DeepSpeed that this machine has no SHM_COMM, so that it neither builds nor loads it. Imports DeepSpeed.

    To be called before `deepspeed.init_distributed`. Only `inference_all_reduce` uses that extension, and training
    never calls it; without it that one falls back to the process group. So ZeRO's first start is a minute shorter, and
    needs no compiler, without which DeepSpeed 0.19 raises in `init_distributed`. The table is the one by which
    DeepSpeed itself leaves the extension out on systems other than Linux.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {**deepspeed.ops.__compatible_ops__, SHM_COMM: False}


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Where what belongs to this machine and user is kept: $SHARDLAB_CACHE, else ~/.cache/shardlab."""
    return Path(environment.get("SHARDLAB_CACHE") or Path.home() / ".cache" / "shardlab")


def _key() -> str:
    try:
        cpu = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    distinct = hashlib.sha256("\n".join((sys.prefix, platform.machine(), cpu)).encode()).hexdigest()[:10]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-torch{_version('torch')}-ds{_version('deepspeed')}-{distinct}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _is_ready(directory: Path) -> bool:
    """Whether the extension was built whole, and no lock would hold up loading it (torch takes it for that too)."""
    marker = directory / _MARKER
    try:
        library = Path(marker.read_text())
    except OSError:
        return False
    return library.exists() and not (directory / "lock").exists()


@contextmanager
def _sole_builder(directory: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of which the kernel lets go when its holder dies, unlike torch's."""
    file = directory / "shardlab.flock"
    with file.open("w") as handle:
        announced = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another process has been building DeepSpeed's extensions in {directory} for the whole "
                        "start-up limit: wait for it to end, or end it (`fuser` on shardlab.flock there names it)"
                    ) from None
            if not announced:
                _say(f"waiting for another process that builds DeepSpeed's extensions in {directory}")
                announced = True
            time.sleep(_POLL_SECONDS)
        yield


def _clear_lock(lock: Path, *, ours: bool, deadline: float) -> None:
    """Wait for torch's `lock` file to go, or remove it if its builder is dead and the directory is ours.

    We hold the flock, so no shardlab is building; but a program that only uses DeepSpeed may be, and torch's builder
    keeps the lock file open. In a user's own directory a builder may also sit on another host, so there it is left.
    """
    started = time.monotonic()
    announced = False
    while lock.exists():
        alive = is_open(lock)
        if ours and not alive:
            _say(f"removing {lock}: a build that was killed left it")
            lock.unlink(missing_ok=True)
            return
        if time.monotonic() > deadline:
            holder = "a process still holds it" if alive else "no process here holds it: a killed build left it"
            raise UserError(
                f"waited {time.monotonic() - started:.0f} s for {lock}; {holder}; "
                f"if nothing builds DeepSpeed's extensions there any more, delete the file: rm '{lock}'"
            )
        if not announced:
            _say(f"waiting up to {deadline - started:.0f} s for {lock}, which says that a build is under way")
            announced = True
        time.sleep(_POLL_SECONDS)


def is_open(file: Path) -> bool:
    """Whether a process of this machine has the file open. Processes of other users can't be seen into."""
    try:
        wanted = file.stat()
    except FileNotFoundError:
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:
            continue  # gone meanwhile, or not ours to look at
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def _build(directory: Path, names: Sequence[str], deadline: float) -> None:
    environment = {
        **os.environ,
        "PATH": path_with_tools(os.environ.get("PATH", os.defpath)),
        "TORCH_EXTENSIONS_DIR": str(directory),
    }
    for name in names:
        short = name.removeprefix("deepspeed_")
        _say(f"building DeepSpeed extension {short} (once, {_ABOUT.get(name, 'some minutes')})")
    log = directory / "build.log"
    command = [sys.executable, "-m", "shardlab.runtime.build_extensions", str(os.getpid()), _MARKER, *names]
    with log.open("wb") as output, Guard() as guard:
        # A session of its own, so that the compilers go with it.
        builder = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        guard.watch([builder.pid])
        try:
            code = builder.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise UserError(
                f"DeepSpeed's extension {', '.join(names)} was not built within the start-up limit: raise it, or use "
                f"shard.backend: fsdp, which needs none; the compiler's output is in {log}"
            ) from None
        finally:
            still_building = builder.poll() is None
            end_sessions([builder], grace_seconds=0.0)
            if still_building:
                for name in names:
                    (directory / name / "lock").unlink(missing_ok=True)  # its holder is dead by our hand
    if code != 0:
        raise UserError(
            f"DeepSpeed's extension {', '.join(names)} did not build ({_cause(log)}): the compiler's output is in "
            f"{log}; mend that, or use shard.backend: fsdp, which needs none"
        )


def _cause(log: Path) -> str:
    """The line of a build's output that says most: the first with "error", else the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = next(
        (line for line in lines if "error:" in line.lower() or "not found" in line), lines[-1] if lines else "no output"
    )
    return said[:200]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
