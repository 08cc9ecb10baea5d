"""Predicted peak memory beside the measured one, and beside what other tools' estimators say.

Each cell is a run of `shardlab train` on random weights; measured is the peak of the rank with the larger one, above
what its libraries hold before there is a model. Errors are of the interval's middle; `inside` says whether the measured
peak lies in the interval. DeepSpeed's estimators and Accelerate's `estimate-memory` are asked about the same models:
the first about states on a GPU, the second about the whole training of one process. Cells marked hf are a loop that is
not ours, `plain_loop.py`, and what `shardlab plan --loop` says of it.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from cells import MODELS, SEQUENCE, Cell, memory_cells, plain_cells
from kept import Kept
from report import MiB, Report, Target

STEPS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("30m", "tiny"), default="30m", help="tiny shows only that it runs")
    parser.add_argument("--only", default="", help="cells whose line contains this, such as zero3 or bf16")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows there; cells in it are not run again")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    chosen = [Cell("tiny", "ddp", ranks=1)] if options.size == "tiny" else [*memory_cells(), *plain_cells()]
    kept = Kept(options.results)
    measure([cell for cell in chosen if options.only in str(cell)], kept).print(options.json)
    return 1 if kept.failed else 0


def measure(chosen: list[Cell], kept: Kept) -> Report:
    """Run every cell that is not among `kept`, one after another."""
    report = Report(
        f"Predicted and measured peak memory of a rank, MiB above the libraries' base: sequence {SEQUENCE}",
        {"cell": "", "tensors": ".0f", "low": ".0f", "middle": ".0f", "high": ".0f", "measured": ".0f",
         "error %": "+.1f", "inside": "", "building": ".0f", "its low": ".0f", "its high": ".0f",
         "writing": ".0f", "its lowest": ".0f", "its highest": ".0f", "DeepSpeed's": ".0f", "Accelerate's": ".0f"},
        notes=["DeepSpeed's: its estimator's memory of a GPU and a CPU's share together, 16-bit weights, states only. "
               "Accelerate's: weights, gradients and Adam in fp32, for one process."],
    )  # fmt: skip
    for cell in chosen:
        row = kept.row(str(cell), partial(_row, cell))
        if row is not None:
            report.rows.append(row)
    report.notes = [*report.notes, *(f"failed: {one}" for one in kept.failed)]
    if not report.rows:
        return report
    errors = sorted(abs(float(row["error %"])) for row in report.rows)
    inside = [row["inside"] == "yes" for row in report.rows]
    report.targets = [
        Target("share of cells outside the interval", 1 - sum(inside) / len(inside), 0.0),
        Target("error in 90% of the cells, %", errors[max(0, int(len(errors) * 0.9) - 1)], 5.0),
        Target("largest error, %", errors[-1], 10.0),
    ]
    return report


def _row(cell: Cell) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        predicted, measured, around = (_ours if cell.loop == "shardlab" else _plain)(cell, Path(directory))
    return {
        **{key: predicted[key] / MiB for key in ("tensors", "low", "middle", "high")},
        "measured": measured / MiB,
        "error %": 100 * (predicted["middle"] / measured - 1),
        "inside": "yes" if predicted["low"] <= measured <= predicted["high"] else "NO",
        **around,
        "DeepSpeed's": _deepspeed(cell),
        "Accelerate's": _accelerate(cell),
    }


def _around(summary: dict[str, Any]) -> dict[str, float]:
    """MiB of the rank that took most while the model was built, and while it was written at the end."""
    figures: dict[str, float] = {}
    columns = {"building": ("its low", "its high"), "writing": ("its lowest", "its highest")}
    for what, (low, high) in columns.items():
        peaks, predicted = summary[f"{what}_memory_bytes"], summary["predicted_memory_bytes"]["around"][what]
        above = [peak - base for base, peak in zip(summary["base_memory_bytes"], peaks, strict=True)]
        figures |= {what: max(above) / MiB, low: predicted["low"] / MiB, high: predicted["high"] / MiB}
    return figures


def _ours(cell: Cell, directory: Path) -> tuple[dict[str, Any], int, dict[str, float]]:
    """What a run of `shardlab train` predicted, the peak of the rank with the larger one, and the same around them."""
    summary = cell.train(directory, STEPS)
    bases, peaks = summary["base_memory_bytes"], summary["peak_memory_bytes"]
    peak = max(peak - base for base, peak in zip(bases, peaks, strict=True))
    return summary["predicted_memory_bytes"], peak, _around(summary)


def _plain(cell: Cell, directory: Path) -> tuple[dict[str, Any], int, dict[str, float]]:
    """The same of a loop that is not ours."""
    recipe, emitted = cell.write_recipe(directory, STEPS), directory / "emitted"
    plan = [sys.executable, "-m", "shardlab", "plan", recipe, "--nproc", cell.ranks, "--loop", cell.loop, "--json"]
    zero = cell.backend.startswith("zero")
    predicted = json.loads(cell.run([*plan, *(["--emit", emitted] if zero else [])]))["recipe"]["footprint"]
    settings, result = recipe.with_name("settings.json"), recipe.with_name("result.json")
    asked = {name: getattr(cell, name) for name in ("precision", "recompute", "micro_batch", "accumulation", "loop")}
    asked |= {"ds_config": json.loads((emitted / "ds_config.json").read_text())} if zero else {}
    settings.write_text(json.dumps({**asked, "model": MODELS[cell.model], "sequence_length": SEQUENCE}))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", cell.ranks] if cell.ranks > 1 else []
    cell.run([sys.executable, *ranks, Path(__file__).with_name("plain_loop.py"), settings, result])
    return predicted, max(json.loads(result.read_text())["peaks"]), {}


def _model(cell: Cell) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[cell.model]))


def _deepspeed(cell: Cell) -> float | None:
    """What its estimator gives for the stage; it has none for stage 1."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints log lines
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = _model(cell)
    total = sum(parameter.numel() for parameter in model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        if cell.backend == "zero2":
            host, device = estimate_zero2_model_states_mem_needs(
                total, num_gpus_per_node=cell.ranks, num_nodes=1, cpu_offload=cell.offload, additional_buffer_factor=1
            )
        elif cell.backend == "zero3":
            largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
            host, device, _largest = estimate_zero3_model_states_mem_needs(
                total, largest, num_gpus_per_node=cell.ranks, num_nodes=1, cpu_offload=cell.offload,
                cpu_offload_params=cell.offload, zero_init=True, additional_buffer_factor=1,
            )  # fmt: skip
        else:
            return None
    return float(device + (host / cell.ranks if cell.offload else 0)) / MiB


def _accelerate(cell: Cell) -> float:
    """Its rule: four times the weights for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _largest = calculate_maximum_sizes(_model(cell))
    return float(max(estimate_training_usage(size, "float32").values())) / MiB


if __name__ == "__main__":
    sys.exit(main())
