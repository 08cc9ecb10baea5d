"""How well the model that is made smaller fits its text, and how much of its width calibration fills."""

import gzip
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor


def beside_compressors(model: Path, section: Any) -> list[str]:
    """Bits per byte of the held-out text, by the model and by gzip and xz, which are given it in one piece."""
    from shardlab.data import evaluation_batches, prepare_data
    from shardlab.data.window import IGNORED
    from shardlab.train.evaluate import evaluate_directory

    prepared = prepare_data(section)
    assert prepared.evaluation is not None
    found = evaluate_directory(model, section)
    pieces = []
    for batch in evaluation_batches(prepared.evaluation, micro_batch=1, rank=0, world_size=1):
        tokens, counted = batch.tensors["input_ids"][0], batch.tensors["targets"][0] != IGNORED
        # What is predicted: the inputs shifted by one. The first of a document is given, the end's mark has no bytes.
        pieces.append(prepared.tokenizer.decode(batch.tensors["targets"][0][counted], skip_special_tokens=True))
        assert len(tokens) == len(counted)
    text = "".join(pieces).encode("utf-8")
    bits = found["loss"] * found["tokens"] / math.log(2) / len(text)
    return [
        f"fit: {bits:.3f} bits per byte of held-out text ({len(text):,} bytes, {found['tokens']:,} tokens, loss "
        f"{found['loss']:.4f}); gzip -9 {8 * len(gzip.compress(text, 9)) / len(text):.3f}, "
        f"xz -9e {8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text):.3f} of the same bytes"
    ]


def calibration_rank(model: Path, section: Any, rows: int) -> str:
    """The effective rank of what layers are given in calibration.

    Of an undertrained model it is small, and any method that looks at it looks good.
    """
    from shardlab.compress.moments import Moments
    from shardlab.compress.stage import read_rows
    from shardlab.compress.walk import Segment, Walk

    found: dict[str, tuple[float, int]] = {}

    def look(segment: Segment) -> Iterator[tuple[str, Tensor]]:
        with Moments(segment.linears) as moments:
            segment.observe()
        for name in segment.linears:
            moment = moments.get(name)
            if moment is not None:
                found[name] = effective_rank(moment), len(moment)
        yield from ()

    walk = Walk(model, read_rows(section, calibration=rows, held_out=1).calibration, [], sequence_length=256)
    for _ in walk.run(look):
        pass
    shares = {name: rank / width for name, (rank, width) in found.items()}
    least = min(shares, key=shares.__getitem__)
    rank, width = found[least]
    return (
        f"calibration: effective rank of a layer's inputs {median(shares.values()):.0%} of their number (median of "
        f"{len(found)} layers), least {rank:.0f} of {width} ({least})"
    )


def effective_rank(moment: Tensor) -> float:
    """exp of the entropy of the eigenvalues of `moment`, as shares of their sum (Roy and Vetterli, 2007)."""
    values = torch.linalg.eigvalsh(moment.double()).clamp_min(0).numpy()
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
