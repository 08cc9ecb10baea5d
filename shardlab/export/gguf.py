"""`shardlab export IN OUT.gguf --to gguf`: for llama.cpp and what is built on it."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from shardlab.errors import UserError
from shardlab.export import gguf_tokenizer
from shardlab.export.gguf_check import Agreement, read_back, run_beside_transformers
from shardlab.export.gguf_families import family, left_wider, tensors
from shardlab.export.gguf_file import FILE_TYPES, GgufDtype, Value, write_gguf
from shardlab.export.source import open_source, require, under_final_name
from shardlab.topology import host_memory_bytes


@dataclass(frozen=True)
class GgufExport:
    """What was written, and how it was checked."""

    path: Path
    bytes: int
    tokens: int
    wider: tuple[str, ...]  # matrices stored as f16, for their rows are no multiple of a block
    agreement: Agreement | None  # None where llama.cpp did not run it
    unchecked: str  # why not

    def text(self) -> str:
        """For people."""
        lines = [f"gguf: {self.path}  {self.bytes:,} bytes, {self.tokens:,} tokens; every value read back"]
        if self.wider:
            lines.append(
                f"f16 instead, rows being no multiple of 32: {len(self.wider)} matrices, {self.wider[0]} first"
            )
        if self.agreement is None:
            lines.append(f"not run by llama.cpp: {self.unchecked}")
        else:
            lines.append(
                f"llama.cpp beside transformers: logits {self.agreement.error:.1e} apart (relative), "
                f"{self.agreement.same_token:.0%} of the likeliest tokens the same"
            )
        return "\n".join(lines)


def export_gguf(directory: Path, output: Path, dtype: GgufDtype) -> GgufExport:
    """Write the model in `directory` as `output`, whose name appears only when the file has been checked.

    One tensor is in memory at a time, but for the run beside transformers, which is left out where memory is short.
    Raises UserError for a model or tokenizer that the format does not hold, ExportCheckError where the check fails.
    """
    require("gguf")
    source = open_source(directory)
    known = family(source)
    planned = tensors(source, dtype)
    settings = {f"{known.architecture}.{key}": value for key, value in known.settings(source.config).items()}
    metadata: dict[str, Value] = {
        "general.architecture": known.architecture,
        "general.name": directory.resolve().name,
        "general.file_type": FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **settings,
        f"{known.architecture}.vocab_size": source.rows,
        **gguf_tokenizer.metadata(source.tokenizer, source.rows),
    }
    with under_final_name(output) as partial:
        write_gguf(partial, metadata, planned)
        read_back(partial, metadata, planned)
        unchecked = _cannot_run(source.parameters)
        agreement = None if unchecked else run_beside_transformers(partial, source, known, dtype)
        size = partial.stat().st_size
    wider = tuple(tensor.name for tensor in left_wider(planned, dtype))
    return GgufExport(output, size, source.rows, wider, agreement, unchecked)


def _cannot_run(parameters: int) -> str:
    """Why llama.cpp can't be run beside transformers here; empty if it can."""
    try:
        require("cyllama")
    except UserError:
        return "it needs cyllama (pip install cyllama)"
    needed = 2 * 4 * parameters  # both models in fp32, the file at most that
    free = min(psutil.virtual_memory().available, host_memory_bytes())
    if needed > free:
        return f"both models take up to {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
    return ""
