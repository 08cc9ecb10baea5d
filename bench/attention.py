"""Attention on one CPU thread, forward and backward: `model.attention: tiles` beside torch's kernel.

The two take turns; CPU time of the thread, the median over rounds. Packed rows hold documents of 128 tokens on average.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from report import Report, Target
from torch import Tensor, nn

SHAPES = {  # rows, heads, key heads, tokens, head dim
    "2 x 12 x 512 x 64": (2, 12, 12, 512, 64),
    "2 x 12 (4) x 512 x 64": (2, 12, 4, 512, 64),
    "4 x 4 x 256 x 64": (4, 4, 4, 256, 64),
    "1 x 12 x 2048 x 64": (1, 12, 12, 2048, 64),
}
DOCUMENT = 128  # tokens, on average


class Layer(nn.Module):
    """What transformers hands over of a layer."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="[default: all]")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report(
        f"Attention, one thread, forward and backward, median of {options.rounds} rounds",
        {"": "", "torch's ms": ".1f", "tiles ms": ".1f", "ratio": ".2f"},
        notes=["rows x heads (key heads) x tokens x head dim; packed: documents of 128 tokens on average"],
    )
    for dtype in (torch.bfloat16, torch.float32):
        for name in options.shapes:
            for packed in (False, True):
                theirs, ours = compare(SHAPES[name], dtype, packed, options.rounds)
                label = f"{str(dtype).removeprefix('torch.')} {name}{', packed' if packed else ''}"
                report.rows.append({"": label, "torch's ms": theirs, "tiles ms": ours, "ratio": ours / theirs})
    worst = max(row["ratio"] for row in report.rows if row[""].startswith("bfloat16"))
    report.targets = [Target("bf16: tiles / torch's, the worst", worst, 1.0)]
    report.print(options.json)


def compare(shape: tuple[int, ...], dtype: torch.dtype, packed: bool, rounds: int) -> tuple[float, float]:
    """Milliseconds of torch's and of ours."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from shardlab.model.attention import attention

    batch, heads, key_heads, tokens, size = shape
    inputs = [
        torch.randn(batch, tokens, n, size, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]
    gradient = torch.randn(batch, tokens, heads, size, dtype=dtype)
    mask = documents(batch, tokens) if packed else None
    layer = Layer(heads // key_heads)

    def timed(function: Any) -> float:
        for tensor in inputs:
            tensor.grad = None
        started = time.thread_time()
        function(layer, *inputs, mask)[0].backward(gradient)
        return 1e3 * (time.thread_time() - started)

    both: Any = (sdpa_attention_forward, attention)
    spent = [[timed(function) for function in both] for _ in range(rounds + 1)][1:]  # the first makes buffers
    theirs, ours = (statistics.median(times) for times in zip(*spent, strict=True))
    return theirs, ours


def documents(rows: int, tokens: int) -> Tensor:
    """(rows, 1, tokens, tokens): whether a query sees a key; each row is cut at places of its own."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masks = []
    for _ in range(rows):
        begins = torch.zeros(tokens, dtype=torch.long)
        begins[torch.randperm(tokens - 1)[: tokens // DOCUMENT - 1] + 1] = 1
        inside = begins.cumsum(0)
        masks.append(causal & (inside[:, None] == inside[None]))
    return torch.stack(masks)[:, None]


if __name__ == "__main__":
    main()
