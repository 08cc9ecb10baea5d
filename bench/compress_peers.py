"""The peers of `compress.py`, each in its own environment: `compress_peers.py NAME MODEL ROWS OUT` is run there.

It needs nothing of shardlab: the rows, calibration and held-out, are tokens in a file that the parent wrote.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

_MARK = "peer-row "
_LIMIT_SECONDS = 3600


def write_rows(file: Path, section: Any, calibration: int, held_out: int) -> None:
    """The rows that our own stages calibrate with, and those that all are judged by."""
    import torch
    from safetensors.torch import save_file

    from shardlab.compress.stage import read_rows

    rows = read_rows(section, calibration=calibration, held_out=held_out)
    tensors = {"calibration": torch.cat([batch["input_ids"] for batch in rows.calibration])}
    for name in ("input_ids", "targets", "position_ids"):
        tensors[name] = torch.cat([batch[name] for batch in rows.held_out])
    save_file(tensors, file)


def peer_row(python: Path, name: str, model: Path, rows: Path, output: Path) -> dict[str, Any]:
    """Run it there; its row. Raises CellError with the end of what it said, where it fails."""
    from kept import CellError

    command = [str(python), __file__, name, str(model), str(rows), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            row: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return row
    raise CellError(f"{name}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")


def main() -> None:
    """In the peer's environment: make the model smaller, keep it, judge it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, model_path, rows_file, output = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    rows = load_file(rows_file)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").eval()
    library, scheme, *method = name.split()
    make = _llm_compressor if library == "llm-compressor" else _torchao
    small = make(scheme, method, model_path, AutoTokenizer.from_pretrained(model_path), rows, output)
    files = [*output.glob("*.safetensors"), *output.glob("*.bin")]
    row = _judged(plain, small, rows) | {"MiB": sum(file.stat().st_size for file in files) / 2**20}
    print(_MARK + json.dumps(row), flush=True)


def _llm_compressor(scheme: str, method: list[str], path: str, tokenizer: Any, rows: Any, output: Path) -> Any:
    """Reloaded from what it wrote."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    bits, _, group = scheme.removeprefix("int").partition("g")
    weights: dict[str, Any] = {"num_bits": int(bits), "type": "int", "symmetric": True, "strategy": "channel"}
    if group:
        weights |= {"strategy": "group", "group_size": int(group)}
    modifier = GPTQModifier if method == ["gptq"] else QuantizationModifier
    recipe = modifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
    calibration = rows["calibration"]
    texts = Dataset.from_dict(
        {"input_ids": calibration.tolist(), "attention_mask": [[1] * calibration.shape[1]] * len(calibration)}
    )
    data = {"dataset": texts, "num_calibration_samples": len(calibration)} if method == ["gptq"] else {}
    oneshot(model=model, processor=tokenizer, recipe=recipe, max_seq_length=calibration.shape[1], **data)
    model.save_pretrained(output, save_compressed=True)
    return AutoModelForCausalLM.from_pretrained(output, dtype="float32").eval()


def _torchao(scheme: str, _method: list[str], path: str, _tokenizer: Any, _rows: Any, output: Path) -> Any:
    """As transformers makes it while loading."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from transformers import AutoModelForCausalLM, TorchAoConfig

    _, _, group = scheme.partition("g")
    config = (
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(int(group)))  # type: ignore[attr-defined]
        if group
        else Int8WeightOnlyConfig()
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32", quantization_config=TorchAoConfig(config))
    model.save_pretrained(output)
    return model.eval()


def _judged(plain: Any, small: Any, rows: Any) -> dict[str, float]:
    """The figures that `compress.py` has of ours, over the same tokens."""
    import torch

    totals, tokens = torch.zeros(4, dtype=torch.float64), 0
    for number in range(len(rows["input_ids"])):
        inputs = {name: rows[name][number : number + 1] for name in ("input_ids", "position_ids")}
        targets = rows["targets"][number]
        counted = targets != -100
        with torch.no_grad():
            first, second = (
                model(**inputs, use_cache=False).logits[0][counted].float().log_softmax(-1) for model in (plain, small)
            )
        losses = [torch.nn.functional.nll_loss(each, targets[counted], reduction="sum") for each in (first, second)]
        lost = torch.nn.functional.kl_div(second, first, reduction="sum", log_target=True)
        totals += torch.stack([*losses, lost, (first.argmax(-1) == second.argmax(-1)).sum()]).double()
        tokens += int(counted.sum())
    before, after, lost_, same = (totals / tokens).tolist()
    return {"perplexity": math.exp(after), "change": math.exp(after - before) - 1, "KL": lost_, "same token": same}


if __name__ == "__main__":
    main()
