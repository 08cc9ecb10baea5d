"""What a rank can do, measured: matrix products, attention, memory, starting an operator, collectives.

The work of each trial is counted by the rules that the planner counts a traced step by, so a rate is what turns that
count into seconds. A trial is repeated and its quickest run kept: what else a machine does only ever adds. A whole
model is slower than its parts, which run alone in warm caches: by how much is measured last, and by the median.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from shardlab.model.trainable import make_trainable
from shardlab.plan import Precision, Work
from shardlab.planner.cost import compute_seconds
from shardlab.planner.rates import Rates
from shardlab.planner.search import row_shapes
from shardlab.planner.work import work_of

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
Trial = Callable[[], object]
_PASSES = (256, 1024)  # tokens: fewer at once are slower, each


class Counting(TorchDispatchMode):
    """Adds up the work of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work += work_of(func, args, kwargs or {}, result)
        return result


def quickest(trial: Trial, seconds: float, device: torch.device) -> float:
    """Seconds of the quickest run of `trial` within about so many; it runs three times at least."""
    return min(_timed(trial, seconds, device))


def _timed(trial: Trial, seconds: float, device: torch.device) -> Iterator[float]:
    """Of each run, after one that is not timed."""
    trial()
    _finish(device)
    ends, runs = time.monotonic() + seconds, 0
    while runs < 3 or time.monotonic() < ends:
        started = time.perf_counter()
        trial()
        _finish(device)
        runs += 1
        yield time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def counted(trial: Trial) -> Work:
    """The work of one run."""
    with Counting() as counting:
        trial()
    return counting.work


def compute_rates(device: torch.device, seconds: float, *, tokens: int = 512, width: int = 512) -> dict[str, Any]:
    """Rates of this rank alone on its device, each from about `seconds` of trials."""
    operation = _operation_seconds(device, seconds)

    def rate(trial: Trial, kind: str) -> float:
        work = counted(trial)
        busy = quickest(trial, seconds, device) - work.operations * operation
        return float(getattr(work, kind)) / max(busy, 1e-9)

    figures: dict[str, Any] = {
        "operation": operation,
        "products": {p: rate(_products(device, dtype, tokens, width), "products") for p, dtype in DTYPES.items()},
        "attention": {p: rate(_attention(device, dtype, tokens, width), "attention") for p, dtype in DTYPES.items()},
        "memory": rate(_elementwise(device, tokens, width), "moved"),
        "stream": rate(_stream(device, 32 * tokens * width), "moved"),
    }
    if device.type != "cpu":  # for what is offloaded
        host, size = torch.zeros(32 * tokens * width, pin_memory=True), 32 * tokens * width * 4
        figures["host_link"] = size / quickest(lambda: host.to(device, non_blocking=True), seconds, device)
        figures["host_memory"] = rate(_stream(torch.device("cpu"), 32 * tokens * width), "moved")
    figures["reached"] = _reached(figures, device, seconds, width)
    return figures


def _reached(
    figures: Mapping[str, Any], device: torch.device, seconds: float, width: int
) -> dict[Precision, dict[int, float]]:
    """What passes through a small model reach of those rates, by precision and tokens."""
    rates = Rates(
        source="",
        products=figures["products"],
        attention=figures["attention"],
        memory=figures["memory"],
        stream=figures["stream"],
        link={},
        network=None,
        host_link=None,
        host_memory=None,
        operation=figures["operation"],
        hop=0.0,
        network_hop=0.0,
        overlaps=device.type != "cpu",
        error=0.0,
    )

    def share(precision: Precision, tokens: int) -> float:
        trial = _passes(device, DTYPES[precision], tokens, width)
        ideal = compute_seconds(counted(trial), precision, rates)
        return ideal / statistics.median(_timed(trial, 2 * seconds, device))

    return {precision: {tokens: share(precision, tokens) for tokens in _PASSES} for precision in DTYPES}


def _passes(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Trial:
    """Forward and backward of a Llama of four blocks, on packed rows."""
    rows = max(1, tokens // 256)
    batch = row_shapes(rows, tokens // rows, packed=True)
    config = LlamaConfig(
        vocab_size=16 * width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=tokens,
    )
    module = make_trainable(AutoModelForCausalLM.from_config(config, dtype=dtype)).to(device)
    on_device = {name: values.to(device) for name, values in batch.items()}

    def trial() -> None:
        module(on_device, 1.0).backward()
        module.zero_grad()

    return trial


def _leaf(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


def _operation_seconds(device: torch.device, seconds: float) -> float:
    """Of an operator on a few numbers, forward and backward."""
    x = _leaf(8, 8, device=device, dtype=torch.float32)

    def trial() -> None:
        y = x
        for _ in range(50):
            y = torch.nn.functional.silu(y * x) + y
        y.sum().backward()
        x.grad = None

    return quickest(trial, seconds, device) / counted(trial).operations


def _products(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Trial:
    """A linear layer up and one down, and their gradients."""
    x = _leaf(tokens, width, device=device, dtype=dtype)
    up, down = (_leaf(*shape, device=device, dtype=dtype) for shape in ((3 * width, width), (width, 3 * width)))

    def trial() -> None:
        ((x @ up.t()) @ down.t()).backward(x.detach())
        x.grad = up.grad = down.grad = None

    return trial


def _attention(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> Trial:
    """Causal, by a mask, as packed rows need it; heads of 64."""
    rows = max(1, tokens // 256)
    heads, length = max(1, width // 64), tokens // rows
    query, key, value = (_leaf(rows, heads, length, 64, device=device, dtype=dtype) for _ in range(3))
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def trial() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out.backward(query.detach())
        query.grad = key.grad = value.grad = None

    return trial


def _elementwise(device: torch.device, tokens: int, width: int) -> Trial:
    """What stands around a block's products: a norm, a gate, a residual."""
    x = _leaf(tokens, 3 * width, device=device, dtype=torch.float32)
    gate = _leaf(tokens, 3 * width, device=device, dtype=torch.float32)

    def trial() -> None:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        (torch.nn.functional.silu(gate) * normed + x).backward(gate.detach())
        x.grad = gate.grad = None

    return trial


def _stream(device: torch.device, elements: int) -> Trial:
    """More than caches hold."""
    a, b = (torch.zeros(elements, device=device) for _ in range(2))

    def trial() -> None:
        a.add_(b)

    return trial


def collective_rates(device: torch.device, seconds: float, *, elements: int = 1 << 21) -> dict[str, Any]:
    """Bytes per second between neighbours in a ring by collective, and seconds of a hop. Every rank calls this."""
    ranks = dist.get_world_size()
    small, whole = torch.zeros(ranks, device=device), torch.zeros(elements // ranks * ranks, device=device)

    def run(name: str, tensor: Tensor) -> Trial:
        part = torch.zeros(tensor.numel() // ranks, device=device)
        if name == "all-reduce":
            return lambda: dist.all_reduce(tensor)
        if name == "all-gather":
            return lambda: dist.all_gather_into_tensor(tensor, part)
        return lambda: dist.reduce_scatter_tensor(part, tensor)

    def timed(trial: Trial) -> float:
        """Ranks keep in step, so every one runs it as often."""
        runs = max(3, int(seconds * 50))
        best = float("inf")
        for _ in range(runs):
            started = time.perf_counter()
            trial()
            _finish(device)
            best = min(best, time.perf_counter() - started)
        return best

    hop = timed(run("all-reduce", small)) / (2 * (ranks - 1))
    link = {}
    for name in ("all-reduce", "all-gather", "reduce-scatter"):
        factor = 2 if name == "all-reduce" else 1
        took = timed(run(name, whole)) - factor * (ranks - 1) * hop
        link[name] = factor * (ranks - 1) / ranks * whole.numel() * 4 / max(took, 1e-9)
    return {"hop": hop, "link": link}
