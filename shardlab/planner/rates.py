"""How fast a rank is: from a preset's table, or measured on this machine by `shardlab doctor --calibrate`.

A table holds what vendors state, of which a program reaches a share: `REACHED`. It is stated, not measured here, and
checked against published throughputs (see docs/planning.md). Measured rates are taken as they are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlab.plan import Precision

GIGA, TERA = 1e9, 1e12
# Of the stated peak: matrix products, attention's kernel (fused), memory bandwidth, links.
REACHED = {"products": 0.7, "attention": 0.4, "memory": 0.8, "link": 0.75}
DEVICES_PER_NODE = 8
_OPERATION_SECONDS = 6e-6  # what starting one kernel takes from eager code: a floor, for the device goes on meanwhile
_HOP_SECONDS, _NETWORK_HOP_SECONDS = 3e-6, 10e-6


@dataclass(frozen=True)
class Rates:
    """Of one rank, in operations and bytes per second; None: there is no such figure.

    `products` and `attention` are by precision. `memory` is for activations, `stream` for whole models. `link` is
    between neighbours on a node, in one direction, by collective; `network` between nodes, a device's share.
    `disk` is of reading and writing at once, several at a time, past the page cache.
    `reached` is what a pass through a model reaches of them, by precision and by tokens of its micro-batch: they are of
    parts, each alone in warm caches.
    `operation` is seconds to start an operator: added on a CPU, hidden behind the device where `overlaps`; `hop` and
    `network_hop` those of a message. `error`: share of a prediction that it may be off by.
    """

    source: str
    products: Mapping[Precision, float]
    attention: Mapping[Precision, float]
    memory: float
    stream: float
    link: Mapping[str, float]
    network: float | None
    host_link: float | None
    host_memory: float | None
    operation: float
    hop: float
    network_hop: float
    overlaps: bool
    error: float
    disk: float | None = None
    reached: Mapping[Precision, Mapping[int, float]] = field(default_factory=dict)

    def share(self, precision: Precision, tokens: float) -> float:
        """Of the rates, reached by a pass over so many tokens; 1 where that was not measured."""
        known = sorted(self.reached.get(precision, {}).items())
        if not known:
            return 1.0
        (low, least), (high, most) = known[0], known[-1]
        if tokens <= low or low == high:
            return least
        way = min(1.0, math.log(tokens / low) / math.log(high / low))
        return least + (most - least) * way


KEYS = (
    "bf16_tflops",
    "fp32_tflops",
    "memory_gb_per_s",
    "link_gb_per_s",
    "network_gb_per_s",
    "host_link_gb_per_s",
    "host_memory_gb_per_s",
    "devices_per_node",
    "disk_gb_per_s",
)
TABLED_ERROR = 0.3


def tabled(preset: Mapping[str, Any], *, accelerator: bool) -> Rates | None:
    """A preset's rates; None where it lacks those of computing."""
    peaks: dict[Precision, float] = {}
    if "bf16_tflops" in preset:
        peaks["bf16"] = preset["bf16_tflops"] * TERA
    if "fp32_tflops" in preset:
        peaks["fp32"] = preset["fp32_tflops"] * TERA
    if not peaks or "memory_gb_per_s" not in preset:
        return None

    def bandwidth(key: str, share: str) -> float | None:
        return preset[key] * GIGA * REACHED[share] if key in preset else None

    link, memory = bandwidth("link_gb_per_s", "link"), bandwidth("memory_gb_per_s", "memory")
    assert memory is not None
    return Rates(
        source="the hardware's stated peaks, of which a share is taken",
        products={precision: peak * REACHED["products"] for precision, peak in peaks.items()},
        attention={precision: peak * REACHED["attention"] for precision, peak in peaks.items()},
        memory=memory,
        stream=memory,
        link={} if link is None else dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), link),
        network=bandwidth("network_gb_per_s", "link"),
        host_link=bandwidth("host_link_gb_per_s", "link") if accelerator else memory / 2,
        host_memory=bandwidth("host_memory_gb_per_s", "memory") if accelerator else memory,
        operation=_OPERATION_SECONDS,
        hop=_HOP_SECONDS,
        network_hop=_NETWORK_HOP_SECONDS,
        overlaps=accelerator,
        error=TABLED_ERROR,
        disk=bandwidth("disk_gb_per_s", "link"),
    )
