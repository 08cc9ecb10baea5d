"""One rank of a calibration: `-m shardlab.doctor.calibrate_job FILE SECONDS WIDTH`, the first rank writes the file."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from shardlab.backends.base import ensure_process_group
from shardlab.doctor.measure import collective_rates, compute_rates
from shardlab.runtime.child import run_rank
from shardlab.runtime.environment import apply_in_process
from shardlab.topology import Topology, check_collectives

_TIMEOUT_SECONDS = 300.0  # a machine may be held up between two collectives


def main() -> None:
    """Measure this rank while the others measure themselves, then what is between them."""
    file, seconds, width = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    apply_in_process()
    topology = Topology.detect(timeout_seconds=_TIMEOUT_SECONDS)
    device = torch.device(topology.device)
    figures: dict[str, Any] = {"accelerator": device.type != "cpu", "threads": torch.get_num_threads()}
    if topology.world_size > 1:
        ensure_process_group(topology)
        check_collectives(topology)  # all start together
    figures |= compute_rates(device, seconds, width=width)
    if topology.world_size > 1:
        figures |= collective_rates(device, seconds)
    if topology.is_main:
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(figures))
        os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(run_rank(main))
