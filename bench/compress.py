"""What each way of making a model smaller costs: perplexity, bytes, and (`--only speed`) speed.

The model is the one of `recipes/compress.yaml`, trained here if it is not there yet. Each row is made by our own stages
from it and judged on the same held-out text by the artifact's own runtime; a peer's rows (`--peer-python`, a Python
with llm-compressor or torchao) by transformers in the peer's process, on the same tokens.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compress_peers import peer_row, write_rows
from compress_text import beside_compressors, calibration_rank
from kept import CellError, Kept
from report import Report, Target

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/compress.yaml"
LENGTH = 256
COLUMNS = {
    "cell": "", "perplexity": ".3f", "change": "+.2%", "KL": ".5f", "same token": ".1%", "MiB": ".2f", "smaller": ".2f",
}  # fmt: skip
SPEED_COLUMNS = {
    "cell": "", "MiB": ".2f", "prefill/s": ",.0f", "decode/s": ",.0f", "decode x": ".2f", "peak MiB": ",.0f",
}  # fmt: skip
PEERS = ("llm-compressor int4g32 gptq", "llm-compressor int8 rtn", "torchao int8", "torchao int4g32 rtn")


@dataclass(frozen=True)
class Way:
    """One way: what makes the artifact (source, output), and the promise about its perplexity, if there is one."""

    make: Callable[[Path, Path], None]
    at_most: float | None = None  # increase of perplexity


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="another model directory [runs/compress/model, trained if need be]")
    parser.add_argument("--rows", type=int, default=128, help=f"held-out rows of {LENGTH} tokens to judge by")
    parser.add_argument("--calibration", type=int, default=128, help="rows to calibrate with")
    parser.add_argument("--ways", help="only those whose name contains this")
    parser.add_argument("--only", choices=["quality", "speed", "peers"], default="quality")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with the peers")
    parser.add_argument("--directory", type=Path, help="artifacts are kept there [temporary]")
    parser.add_argument("--results", type=Path, help="rows are kept there, and not measured again")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = arguments.model or trained()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if arguments.only == "speed":
            report = speed_report(model, directory, arguments)
        else:
            report = quality_report(model, directory, arguments)
    report.print(arguments.json)


def trained() -> Path:
    """The recipe's model, trained once."""
    output = ROOT / "runs/compress"
    if not (output / "model/config.json").is_file():
        command = [sys.executable, "-m", "shardlab", "train", str(RECIPE), "--output", str(output)]
        resume = ["--resume"] if output.exists() else []
        subprocess.run([*command, *resume], check=True, stdout=sys.stderr, cwd=ROOT)
    return output / "model"


def data(model: Path) -> Any:
    """The text of the recipe, in the model's tokens: what training held out is held out here."""
    from shardlab.recipe import DataSection

    return DataSection(tokenizer=str(model.absolute()), sequence_length=LENGTH)


def ways(model: Path, calibration: int) -> dict[str, Way]:
    """All that is compared, by name."""
    from shardlab.compress.prune import PruneConfig, prune
    from shardlab.compress.quantize import QuantizeConfig, quantize
    from shardlab.compress.stage import read_rows
    from shardlab.export.gguf import export_gguf
    from shardlab.export.hf import export_hf
    from shardlab.export.onnx import export_onnx
    from shardlab.export.onnx_weights import parse_onnx_dtype

    rows = read_rows(data(model), calibration=calibration, held_out=4)

    def quantized(scheme: str, method: Any, at_most: float | None = None) -> Way:
        config = QuantizeConfig(scheme, method=method, on_indivisible="smaller")
        return Way(lambda source, out: _ignore(quantize(source, out, config, rows, LENGTH, _quiet)), at_most)

    def pruned(method: Any, sparsity: float | None = None, pattern: str | None = None) -> Way:
        config = PruneConfig(method, sparsity, pattern)
        return Way(lambda source, out: _ignore(prune(source, out, config, rows, LENGTH, _quiet)))

    def gguf(dtype: Any) -> Way:
        return Way(lambda source, out: _ignore(export_gguf(source, out, dtype)))

    def onnx(dtype: str) -> Way:
        return Way(lambda source, out: _ignore(export_onnx(source, out, parse_onnx_dtype(dtype))))

    found = {"hf bf16": Way(lambda source, out: _ignore(export_hf(source, out, "bf16")))}
    found |= {f"{s} {m}": quantized(s, m) for s in ("int8", "int4g128", "int3g32", "int2g32") for m in ("rtn", "gptq")}
    found |= {"int4g32 rtn": quantized("int4g32", "rtn"), "int4g32 gptq": quantized("int4g32", "gptq", 0.02)}
    found |= {"w8a8 gptq": quantized("w8a8", "gptq")}
    found |= {f"channels {share:.0%}": pruned("channels", share) for share in (0.125, 0.25, 0.5)}
    found |= {f"{m} 50%": pruned(m, 0.5) for m in ("magnitude", "wanda", "sparsegpt")}
    found |= {f"{m} 2:4": pruned(m, pattern="2:4") for m in ("magnitude", "wanda", "sparsegpt")}
    found |= {f"gguf {dtype}": gguf(dtype) for dtype in ("f16", "q8_0", "q4_0", "q4_1")}
    return found | {f"onnx {dtype}": onnx(dtype) for dtype in ("fp32", "int8", "int8g32", "int4")}


def quality_report(model: Path, directory: Path, arguments: argparse.Namespace) -> Report:
    """Perplexity and bytes of every way, or of the peers'."""
    from shardlab.compress.card import weight_bytes

    kept, section, size = Kept(arguments.results), data(model), weight_bytes(model)
    report = Report("What making a model smaller costs", COLUMNS)
    own = {} if arguments.only == "peers" else ways(model, arguments.calibration)
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, way in own.items():
        cells[name] = partial(judged, name, way, model, directory, arguments.rows)
    if arguments.only == "peers":
        if arguments.peer_python is None:
            raise SystemExit("--only peers needs --peer-python, an interpreter with llm-compressor and torchao")
        rows = directory / "rows.safetensors"
        write_rows(rows, section, arguments.calibration, arguments.rows)
        for name in PEERS:
            output = directory / name.replace(" ", "-")
            cells[name] = partial(peer_row, arguments.peer_python, name, model, rows, output)
    else:
        report.notes = [*beside_compressors(model, section), calibration_rank(model, section, arguments.calibration)]
    for name, measure in cells.items():
        if arguments.ways and arguments.ways not in name:
            continue
        row = kept.row(f"{name}, {arguments.rows} rows", measure)
        if row is None:
            continue
        report.rows.append({**row, "cell": name, "smaller": size / (row["MiB"] * 2**20)})
        if name in own and (limit := own[name].at_most) is not None:
            report.targets.append(Target(f"{name}: increase of perplexity", row["change"], limit))
    report.notes = [*report.notes, *kept.failed]
    return report


def made(name: str, way: Way, model: Path, directory: Path) -> Path:
    """The artifact, made if it is not there."""
    from shardlab.errors import UserError

    path = directory / (
        name.replace(" ", "-").replace(":", "of").replace("%", "") + (".gguf" if "gguf" in name else "")
    )
    if not path.exists():
        try:
            way.make(model, path)
        except (UserError, RuntimeError) as error:
            raise CellError(f"{name}: {error}") from error
    return path


def judged(name: str, way: Way, model: Path, directory: Path, rows: int) -> dict[str, Any]:
    """One way's row."""
    from shardlab.export.artifact import artifact_bytes, compare_artifacts

    path = made(name, way, model, directory)
    quality = compare_artifacts(model, path, data(model), rows=rows)
    return {
        "perplexity": quality.perplexity_after,
        "change": quality.perplexity_after / quality.perplexity_before - 1,
        "KL": quality.divergence,
        "same token": quality.agreement,
        "MiB": artifact_bytes(path) / 2**20,
    }


def speed_report(model: Path, directory: Path, arguments: argparse.Namespace) -> Report:
    """Speed of every way beside the model as it was, one after the other, on one thread."""
    from shardlab.export.speed import SpeedConfig, measure_speed

    report = Report("How fast a smaller model is, one thread", SPEED_COLUMNS)
    config = SpeedConfig(prompt_tokens=LENGTH, new_tokens=64, threads=1)
    every = {"as it was": Way(lambda _source, _out: None), **ways(model, arguments.calibration)}
    kept = Kept(arguments.results)
    for name, way in every.items():
        if arguments.ways and arguments.ways not in name and name != "as it was":
            continue

        def measure(name: str = name, way: Way = way) -> dict[str, Any]:
            path = model if name == "as it was" else made(name, way, model, directory)
            before, speed = measure_speed(model, config), measure_speed(path, config)
            return {
                "MiB": speed.file_bytes / 2**20,
                "prefill/s": speed.prefill_tokens_per_second,
                "decode/s": speed.decode_tokens_per_second,
                "decode x": speed.decode_tokens_per_second / before.decode_tokens_per_second,
                "peak MiB": speed.peak_bytes / 2**20,
            }

        row = kept.row(f"{name}, speed", measure)
        if row is not None:
            report.rows.append({**row, "cell": name})
    report.notes = kept.failed
    return report


def _quiet(_text: str) -> None:
    """A stage's progress."""


def _ignore(_result: object) -> None:
    """What a stage returns is in its card."""


if __name__ == "__main__":
    main()
