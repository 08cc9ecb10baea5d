"""`shardlab export IN OUT --to onnx`: a directory for onnxruntime, and for what looks for Optimum's names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.stage import output_directory, refuse_existing
from shardlab.errors import UserError
from shardlab.export.gguf_check import Agreement, ExportCheckError, spread
from shardlab.export.onnx_graph import memory_of, traced
from shardlab.export.onnx_runtime import FILE, OnnxModel
from shardlab.export.onnx_weights import OnnxDtype, shrink
from shardlab.export.source import Source, open_source, require
from shardlab.topology import host_memory_bytes

BOUNDS = {"fp32": 1e-4, "int8": 1e-1, "int8g": 3e-2, "int4g": 1e-1}
"""How far onnxruntime's logits may be from those of transformers with the file's own weights, as in `gguf_check`: the
rounded dtypes round inputs too. By dtype, without the group's size."""

_PROTOBUF_BYTES = 2**31 - 2**24  # of one file; more goes to a file beside
_BEYOND_WINDOW = 16  # tokens that are compared behind a sliding window's end
_LONGEST = 1024  # tokens: a window that is longer is not reached


@dataclass(frozen=True)
class OnnxExport:
    """What was written, and how it was checked."""

    path: Path
    bytes: int  # of the graph and its weights
    rounded: int  # layers with fewer bits
    wider: tuple[str, ...]  # layers that stayed fp32
    agreement: Agreement
    shapes: tuple[tuple[int, int], ...]  # (batch, tokens) of each comparison

    def text(self) -> str:
        """For people."""
        lines = [f"onnx: {self.path}  {self.bytes:,} bytes"]
        if self.wider:
            lines.append(f"fp32 still, groups don't divide their inputs: {len(self.wider)}, {self.wider[0]} first")
        shapes = ", ".join(f"{batch} x {tokens}" for batch, tokens in self.shapes)
        lines.append(
            f"onnxruntime beside transformers: logits {self.agreement.error:.1e} apart (relative), "
            f"{self.agreement.same_token:.0%} of the likeliest tokens the same; {shapes} tokens, whole and in parts"
        )
        return "\n".join(lines)


def export_onnx(directory: Path, output: Path, dtype: OnnxDtype) -> OnnxExport:
    """Write the model in `directory` as `output`, a directory whose name appears only when it has been checked.

    The model is in memory whole, more than once. Raises UserError for a model that can't be exported or that memory is
    too short for, ExportCheckError where the check fails.
    """
    for library in ("onnx_ir", "onnxscript", "onnxruntime"):
        require(library)
    refuse_existing(output)
    source = open_source(directory)
    _refuse_short_memory(source)
    model = _loaded(source)
    graph = traced(model, memory_of(model))
    wider: tuple[str, ...] = ()
    rounded = 0
    if dtype.grid is not None:
        account = shrink(graph.graph, dtype.grid, model)
        if not account.values:
            raise UserError(f"--dtype {dtype.name}: groups of {dtype.grid.group_size} divide no layer's inputs")
        wider, rounded = tuple(account.left), len(account.values)
        account.give(model)
    with output_directory(directory, output) as partial:
        _save(graph, partial, source.parameters)
        agreement, shapes = compare(partial, model, source, dtype)
        size = sum(path.stat().st_size for path in partial.glob(f"{FILE}*"))
        figures = {
            "weight_bytes": {"before": weight_bytes(directory), "after": size},
            "relative_logit_error": agreement.error,
            "same_likeliest_token": agreement.same_token,
        }
        layers = dict.fromkeys(wider, "fp32: a group does not divide its inputs")
        config = {"to": "onnx", "dtype": dtype.name}
        Card("export", config, directory.name, figures, layers, lineage_of(directory)).write(partial)
    return OnnxExport(output, size, rounded, wider, agreement, shapes)


def compare(directory: Path, model: Any, source: Source, dtype: OnnxDtype) -> tuple[Agreement, tuple[Any, ...]]:
    """onnxruntime beside `model`, which has the file's weights: (how they agree, shapes), none of them the traced one.

    Each text goes through onnxruntime whole, and then in parts: a beginning, then more tokens and single ones after
    what it remembers. Batches are padded on the left. Raises ExportCheckError beyond the bound.
    """
    bound = BOUNDS[dtype.name.rstrip("0123456789") if dtype.grid and dtype.grid.group_size else dtype.name]
    runtime = OnnxModel(directory)
    draw, squares, largest, same = np.random.default_rng(0), np.zeros(2), 0.0, list[bool]()
    shapes = _shapes(source.config)
    for batch, length in shapes:
        tokens = draw.choice(np.array(sorted(source.tokenizer.get_vocab().values())), (batch, length))
        mask = np.ones_like(tokens)
        for row in range(1, batch):
            mask[row, : min(row, length - 1)] = 0
        with torch.no_grad():
            wanted = model(
                input_ids=torch.from_numpy(tokens),
                attention_mask=torch.from_numpy(mask),
                position_ids=torch.from_numpy(np.maximum(mask.cumsum(-1) - 1, 0)),
                use_cache=False,
            ).logits.numpy()
        for parts in ([length], _parts(length)):
            got = _in_parts(runtime, tokens, mask, parts)
            real = mask.astype(bool)
            difference = (got - wanted)[real]
            largest = max(largest, float(np.abs(difference).max()))
            squares += [spread(difference), spread(wanted[real])]
            same.extend(got[real].argmax(-1) == wanted[real].argmax(-1))
    runtime.close()
    agreement = Agreement(float(np.sqrt(squares[0] / squares[1])), largest, float(np.mean(same)))
    if not agreement.error <= bound:  # also if it is NaN
        raise ExportCheckError(
            f"onnxruntime's logits are {agreement.error:.2g} from transformers', allowed are {bound:.2g} for "
            f"{dtype.name} ({agreement.same_token:.0%} of the likeliest tokens agree)"
        )
    return agreement, shapes


def _shapes(config: Any) -> tuple[tuple[int, int], ...]:
    positions = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None) or 0
    lengths = [(1, 1), (1, 7), (3, 11), (1, 40), *([(1, window + _BEYOND_WINDOW)] if 0 < window < _LONGEST else [])]
    return tuple(dict.fromkeys((batch, min(length, positions)) for batch, length in lengths))


def _parts(length: int) -> list[int]:
    """More than half, two tokens, and single ones."""
    first = length // 2 + 1
    second = min(2, length - first)
    return [part for part in (first, second, *[1] * (length - first - second)) if part > 0]


def _in_parts(
    runtime: OnnxModel, tokens: NDArray[np.int64], mask: NDArray[np.int64], parts: list[int]
) -> NDArray[np.float32]:
    runtime.forget()
    found, start = [], 0
    for part in parts:
        end = start + part
        found.append(runtime.forward(tokens[:, start:end], np.ascontiguousarray(mask[:, :end])))
        start = end
    return np.concatenate(found, axis=1)


def _loaded(source: Source) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32).eval()


def _save(graph: Any, directory: Path, parameters: int) -> None:
    ir = require("onnx_ir")
    large = 4 * parameters > _PROTOBUF_BYTES
    ir.save(graph, directory / FILE, external_data=f"{FILE}.data" if large else None)


def _refuse_short_memory(source: Source) -> None:
    needed = 4 * 4 * source.parameters  # the model, the graph's copy of it, what is written, what onnxruntime loads
    free = min(psutil.virtual_memory().available, host_memory_bytes())
    if needed > free:
        raise UserError(
            f"onnx export takes up to {needed / 2**30:.1f} GiB for {source.directory}, {free / 2**30:.1f} are free; "
            "--to gguf takes a tensor at a time"
        )
