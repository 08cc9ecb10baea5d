"""Ranks for the doctor: as `runtime.job` has them, but two of them on the CPU where there is one accelerator."""

import os
import sys

from shardlab.runtime import job
from shardlab.runtime.job import Ended

__all__ = ["Ended", "RankJob"]


class RankJob(job.RankJob):
    """`module` as `nproc` ranks, on the CPU where there are fewer accelerators than ranks."""

    launcher = "shardlab.doctor.ranks"


def main() -> int:
    """The process that launches."""
    import torch

    if 0 < torch.accelerator.device_count() < int(sys.argv[2]):
        # Two ranks can't share an accelerator: they run on the CPU then.
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    return job.main()


if __name__ == "__main__":
    sys.exit(main())
