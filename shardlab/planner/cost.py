"""Seconds of an optimizer step: the work of the trace, the backend's traffic, and the rates of a machine.

A micro-batch takes the time of its matrix products and attention, of the bytes that everything else moves, and of
starting each operator. Collectives are rings: a rank sends (n - 1) / n of the bytes (twice that in an all-reduce) to
its neighbour, in n - 1 hops, at the rate of the slowest link in the ring. Between nodes all devices of a node share its
network.

What may go on at once: on an accelerator a collective hides behind the pass that it belongs to, but for one of its
calls, which nothing is left to hide behind; so does what offload sends over the host's link. On a CPU nothing hides:
the threads that send are those that compute. The disk of backend stream does go on by itself, everywhere.
"""

import math
from dataclasses import dataclass, field

from shardlab.backends.placement import Setting, away_bytes
from shardlab.backends.stream.footprint import moved
from shardlab.backends.traffic import Exchange, exchanges, moves
from shardlab.plan import Precision, Work
from shardlab.planner.machine import Machine
from shardlab.planner.rates import Rates

_SMALL_REDUCTIONS = 2  # of a window: the loss, the norm


@dataclass(frozen=True)
class Cost:
    """Of one optimizer step, in seconds; `parts` add up to `seconds`, which is meant to be right within `error`."""

    seconds: float
    tokens_per_second: float
    error: float
    parts: dict[str, float] = field(default_factory=dict)
    unhindered: int | None = None  # of backend stream: sequences a step from which it need not wait for the disk


def cost(setting: Setting, machine: Machine, tokens: int) -> Cost | None:
    """Of a plan whose global batch has `tokens`; None where the machine has no rate for something that it needs."""
    rates, plan = machine.rates, setting.plan
    if rates is None or plan.precision not in rates.products:
        return None
    passes = {"forward": Work(), "backward": Work()}
    for span in setting.timeline:
        passes[span.phase] += span.work
    rows = tokens * plan.micro_batch / plan.global_batch_size
    share = rates.share(plan.precision, rows)
    seconds = {phase: compute_seconds(work, plan.precision, rates) / share for phase, work in passes.items()}
    sending = _sending(setting, machine, rates, seconds)
    moving = _moving(setting, rates, sum(seconds.values()))
    if sending is None or moving is None:
        return None
    parts = {phase: each * plan.accumulation for phase, each in seconds.items()} | sending | moving
    unhindered = None
    if plan.backend == "stream":
        found = _waiting(setting, rates, parts)
        if found is None:
            return None
        parts["disk"], unhindered = found
    elif plan.offload.activations == "disk":
        shown = _away(setting, rates, seconds)
        if shown is None:
            return None
        parts["disk"] = shown
    if plan.offload.activations == "disk":
        parts["copies"] += plan.accumulation * 2 * away_bytes(setting) / rates.stream
    total = sum(parts.values())
    return Cost(total, tokens / total, rates.error, parts, unhindered)


def compute_seconds(work: Work, precision: Precision, rates: Rates) -> float:
    """Of a pass that reaches the rates of its parts."""
    busy = work.products / rates.products[precision] + work.attention / rates.attention[precision]
    busy += work.moved / rates.memory
    starting = work.operations * rates.operation
    return max(busy, starting) if rates.overlaps else busy + starting


def _waiting(setting: Setting, rates: Rates, parts: dict[str, float]) -> tuple[float, int] | None:
    """Seconds that the passes wait for the disk, and the sequences a step that would fill them.

    While a segment computes the next is read, updated (in the forward pass) and the last one's gradient written: of
    each pass shows what the disk takes longer than the computing. A longer step has more to compute and, but for
    inputs of blocks that go to the disk, as much to move.
    """
    if rates.disk is None:
        return None
    found, batch = moved(setting), setting.plan.global_batch_size
    shown, filled = 0.0, batch
    for phase, both, busy in (("forward", found.forward, parts["update"]), ("backward", found.backward, 0.0)):
        left = sum(both) / rates.disk - busy
        shown += max(0.0, left - parts[phase])
        if parts[phase]:
            filled = max(filled, math.ceil(batch * left / parts[phase]))
    return shown, filled


def _away(setting: Setting, rates: Rates, seconds: dict[str, float]) -> float | None:
    """What shows of saving the blocks' activations to the disk: what a pass is too short for."""
    if rates.disk is None:
        return None
    size = away_bytes(setting)
    return setting.plan.accumulation * sum(max(0.0, size / rates.disk - each) for each in seconds.values())


def _sending(setting: Setting, machine: Machine, rates: Rates, seconds: dict[str, float]) -> dict[str, float] | None:
    """What shows of the collectives, and the copies around them."""
    shown = copying = 0.0
    behind: dict[str, list[tuple[Exchange, float]]] = {}
    for exchange in exchanges(setting):
        each = exchange_seconds(exchange, machine, rates)
        if each is None:
            return None
        copying += exchange.copied / rates.stream
        if exchange.behind == "nothing" or not rates.overlaps:
            shown += each
        else:
            behind.setdefault(exchange.behind, []).append((exchange, each))
    for phase, found in behind.items():
        room = max(exchange.times for exchange, _ in found) * seconds[phase]
        # One call of each micro-batch has nothing to hide behind: the first gather, the last reduction.
        alone = max(each * exchange.times / exchange.calls for exchange, each in found)
        shown += alone + max(0.0, sum(each for _, each in found) - alone - room)
    if setting.plan.world_size > 1:
        small = Exchange("all-reduce", 0, _SMALL_REDUCTIONS, "nothing", 1, setting.plan.world_size)
        shown += exchange_seconds(small, machine, rates) or 0.0
    return {"communication": shown, "copies": copying}


def exchange_seconds(exchange: Exchange, machine: Machine, rates: Rates) -> float | None:
    """All calls of an exchange; None where a link's rate is not known."""
    ranks, factor = exchange.ranks, 2 if exchange.collective == "all-reduce" else 1
    if ranks == 1:
        return 0.0
    per_node = -(-machine.ranks // machine.nodes)
    crossing = machine.nodes > 1 and ranks * exchange.stride > per_node
    if exchange.shared and not crossing:
        return exchange.calls * rates.hop
    within = not crossing or exchange.stride < per_node
    links, hop = [], rates.hop
    if within:
        links.append(rates.link.get(exchange.collective))
    if crossing:
        # Rings that leave a node at the same time share its network.
        rings = min(per_node, exchange.stride)
        links.append(None if rates.network is None else rates.network * per_node / rings)
        nodes = machine.nodes if within else ranks
        hop = (rates.hop * (ranks - nodes) + rates.network_hop * nodes) / ranks
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return None
    sent = factor * (ranks - 1) / ranks * exchange.size
    return sent / min(known) + exchange.calls * factor * (ranks - 1) * hop


def _moving(setting: Setting, rates: Rates, passes: float) -> dict[str, float] | None:
    """The update, and what offload sends."""
    found = moves(setting)
    parts = {"update": found.update / rates.stream}
    if found.host or found.up or found.down:
        if rates.host_link is None or rates.host_memory is None:
            return None
        parts["update"] += found.host / rates.host_memory
        if rates.overlaps:  # both ways at once, behind the passes
            sending = max(found.up, found.down) / rates.host_link
            parts["offload"] = max(0.0, sending - passes * setting.plan.accumulation)
        else:
            parts["offload"] = (found.up + found.down) / rates.stream
    return parts
