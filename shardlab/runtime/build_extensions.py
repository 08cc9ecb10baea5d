"""Builds DeepSpeed extensions, for `extensions.prebuild`.

`python -m shardlab.runtime.build_extensions PARENT MARKER NAME…`.

A process of its own, because it imports torch and DeepSpeed and must be killable with its compilers.
"""

import os
import sys
from pathlib import Path

from shardlab.runtime.environment import has_accelerator
from shardlab.runtime.processes import die_with

_BUILDERS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}


def main() -> None:
    """Build and load each extension, which is what a rank will do; then mark it as whole."""
    parent, marker, *names = sys.argv[1:]
    die_with(int(parent))
    if not has_accelerator():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    for name in names:
        library = get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=True).__file__
        directory = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name
        directory.mkdir(exist_ok=True)  # not there if DeepSpeed was installed with the extension built
        (directory / marker).write_text(str(library))


if __name__ == "__main__":
    main()
