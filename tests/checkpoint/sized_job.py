"""The command line's `checkpoint ...`, measured from inside: `python -m tests.checkpoint.sized_job convert IN OUT`."""

import json
import sys
import threading
from contextlib import redirect_stdout

import shardlab.checkpoint.convert
import shardlab.checkpoint.dcp_write
import shardlab.checkpoint.export  # noqa: F401  (what is imported belongs to the base)
from shardlab.cli import app
from tests.checkpoint.growth import resident

PERIOD_SECONDS = 0.005


def main() -> None:
    if "zero3" in sys.argv:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler  # noqa: F401
    base = peak = resident("RssAnon")
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(PERIOD_SECONDS):
            peak = max(peak, resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with redirect_stdout(sys.stderr):
            app(["checkpoint", *sys.argv[1:]], standalone_mode=False)
    finally:
        done.set()
        watcher.join()
    print(json.dumps({"base": base, "peak": peak, "data": resident("VmData")}))


if __name__ == "__main__":
    main()
