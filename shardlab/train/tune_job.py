"""One rank of a trial: `python -m shardlab.train.tune_job RECIPE FILE STEPS`, the first rank writes what it measured.

The run's own path up to its steps, then so many of them; no files of a run, no evaluation, no checkpoint.
"""

import json
import os
import statistics
import sys
from pathlib import Path

from shardlab.data import prepare
from shardlab.recipe import load_recipe
from shardlab.runtime.child import run_rank
from shardlab.train.engine import Engine
from shardlab.train.run import WARM_STEPS, per_rank, setup_from_recipe


def main() -> None:
    """Every rank runs the same steps; the slowest rank's time is the step's, for it holds up the others."""
    recipe, file, steps = load_recipe(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with Engine.from_recipe(recipe) as engine:
        data = prepare(engine.recipe.data)
        data = setup_from_recipe(engine, data)
        plan, topology = engine.plan, engine.topology
        windows = data.windows(
            global_batch_size=plan.global_batch_size,
            micro_batch=plan.micro_batch,
            rank=topology.rank,
            world_size=topology.world_size,
            seed=plan.seed,
            steps=steps,
        )
        engine.meter.reset()
        results = [engine.run(window) for window in windows]
        peaks = per_rank(engine.meter.peak_bytes() - engine.base_bytes, topology)
        timed = results[WARM_STEPS:] or results
        nanoseconds = per_rank(round(statistics.median(result.seconds for result in timed) * 1e9), topology)
        seconds = max(nanoseconds) / 1e9
        if topology.is_main:
            tokens = statistics.mean(result.tokens for result in timed)
            figures = {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak_bytes": max(peaks)}
            partial = file.with_suffix(".part")
            partial.write_text(json.dumps(figures))
            os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(run_rank(main))
