"""What a smaller model is to keep, which of those that were tried keep it, and what comes nearest to it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardlab.errors import UserError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Tried:
    """One candidate, measured. `decode_speedup` None: not measured."""

    name: str
    bytes: int  # on disk
    increase: float  # of perplexity, as a share of the original's
    decode_speedup: float | None = None

    def line(self) -> str:
        """For people."""
        speed = "" if self.decode_speedup is None else f", decodes {self.decode_speedup:.2f} times as fast"
        return f"{self.name}: {self.bytes / 1e6:.2f} MB, perplexity {self.increase:+.2%}{speed}"


@dataclass(frozen=True)
class Promise:
    """Each None where nothing is promised."""

    max_bytes: float | None = None
    max_increase: float | None = None
    min_decode_speedup: float | None = None

    def excess(self, tried: Tried) -> dict[str, float]:
        """By how much each part is missed, as a share of what was promised; parts that are kept are left out.

        An increase of perplexity counts as the perplexity's, so that the parts can be compared.
        """
        found = {}
        if self.max_bytes is not None:
            found["bytes"] = tried.bytes / self.max_bytes - 1
        if self.max_increase is not None:
            found["perplexity"] = (1 + tried.increase) / (1 + self.max_increase) - 1
        if self.min_decode_speedup is not None and tried.decode_speedup is not None:
            found["speed"] = self.min_decode_speedup / tried.decode_speedup - 1
        return {part: over for part, over in found.items() if not over <= 0}

    def text(self) -> str:
        """For people."""
        parts = []
        if self.max_bytes is not None:
            parts.append(f"at most {self.max_bytes / 1e6:.2f} MB")
        if self.max_increase is not None:
            parts.append(f"perplexity at most {self.max_increase:+.2%}")
        if self.min_decode_speedup is not None:
            parts.append(f"decoding at least {self.min_decode_speedup:g} times as fast")
        return ", ".join(parts)


def parse_promise(max_bytes: str | None, max_increase: str | None, min_decode_speedup: float | None) -> Promise:
    """`60MB` (powers of 1000), `60MiB`; `3%` or `0.03`. Raises UserError for anything else, and for no promise."""
    if max_bytes is None and max_increase is None and min_decode_speedup is None:
        raise UserError("promise something: --max-bytes, --max-ppl-increase or --min-decode-speedup")
    bytes_ = None
    if max_bytes is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", max_bytes.strip(), flags=re.IGNORECASE)
        if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
            raise UserError(f"--max-bytes {max_bytes}: write a number and a unit, such as 60MB or 60MiB")
        bytes_ = float(found[1]) * _UNITS[found[2].upper()]
    increase = None
    if max_increase is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", max_increase.strip())
        if found is None:
            raise UserError(f"--max-ppl-increase {max_increase}: write a share, such as 3% or 0.03")
        increase = float(found[1]) / (100 if found[2] else 1)
    return Promise(bytes_, increase, min_decode_speedup)


def front(tried: Iterable[Tried]) -> list[Tried]:
    """Those that no other beats in bytes and perplexity both, the smallest first."""
    found: list[Tried] = []
    for one in sorted(tried, key=lambda each: (each.bytes, each.increase, each.name)):
        if not found or one.increase < found[-1].increase:
            found.append(one)
    return found


def refusal(promise: Promise, tried: list[Tried]) -> str:
    """Why no candidate keeps `promise`: what comes nearest, and what could be kept of it."""
    nearest = min(tried, key=lambda one: (max(promise.excess(one).values()), one.bytes))
    over = ", ".join(f"{part} by {share:.1%}" for part, share in promise.excess(nearest).items())
    lines = [f"none of {len(tried)} keeps {promise.text()}; nearest is {nearest.line()}, which misses {over}"]
    if promise.max_increase is not None:
        kept = [one for one in tried if one.increase <= promise.max_increase]
        if kept and promise.max_bytes is not None:
            smallest = min(kept, key=lambda one: one.bytes)
            lines.append(f"smallest with that perplexity: {smallest.line()}")
    if promise.max_bytes is not None and (kept := [one for one in tried if one.bytes <= promise.max_bytes]):
        best = min(kept, key=lambda one: one.increase)
        lines.append(f"best of that size: {best.line()}")
    return "; ".join(lines)


def table(tried: list[Tried], promise: Promise) -> list[str]:
    """The front, and whether each keeps the promise; lines."""
    lines = [f"{'the front':<28} {'MB':>10} {'perplexity':>11} {'decode':>8}"]
    for one in front(tried):
        speed = "-" if one.decode_speedup is None else f"{one.decode_speedup:.2f}x"
        misses = promise.excess(one)
        said = f"misses {', '.join(misses)}" if misses else "kept"
        lines.append(f"{one.name:<28} {one.bytes / 1e6:>10.2f} {one.increase:>+11.2%} {speed:>8}  {said}")
    return lines


def picture(tried: list[Tried], promise: Promise, title: str) -> str:
    """Bytes and perplexity of all, and the front, as SVG."""
    from math import log2

    width, height, edge = 720, 420, 60
    sizes = [log2(one.bytes) for one in tried] + ([log2(promise.max_bytes)] if promise.max_bytes else [])
    losses = [one.increase for one in tried] + ([promise.max_increase] if promise.max_increase is not None else [])
    # What is far worse than the promise would press all else together: it stands at the upper border.
    top = max(min(max(losses), 4 * promise.max_increase if promise.max_increase else max(losses)), 1e-6)
    low, left, right = min(0.0, *losses), min(sizes) - 0.2, max(sizes) + 0.2

    def x(bytes_: float) -> float:
        return edge + (log2(bytes_) - left) / (right - left) * (width - 2 * edge)

    def y(increase: float) -> float:
        return height - edge - (min(increase, top) - low) / (top - low) * (height - 2 * edge)

    best = front(tried)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{edge}" y="24" font-size="14">{title}</text>',
        f'<text x="{width - edge}" y="{height - 20}" text-anchor="end">MB on disk (logarithmic)</text>',
        f'<text x="{edge}" y="{edge - 10}">increase of perplexity, up to {top:.1%}</text>',
    ]
    if promise.max_bytes:
        at = x(promise.max_bytes)
        parts.append(f'<path d="M{at:.1f} {edge}V{height - edge}" stroke="#999" stroke-dasharray="4"/>')
    if promise.max_increase is not None:
        at = y(promise.max_increase)
        parts.append(f'<path d="M{edge} {at:.1f}H{width - edge}" stroke="#999" stroke-dasharray="4"/>')
    line = " ".join(f"{x(one.bytes):.1f},{y(one.increase):.1f}" for one in best)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#06c"/>')
    for one in tried:
        colour = "#090" if not promise.excess(one) else "#c40"
        place = f'cx="{x(one.bytes):.1f}" cy="{y(one.increase):.1f}"'
        parts.append(f'<circle {place} r="4" fill="{colour}"><title>{one.line()}</title></circle>')
    for number, one in enumerate(best):
        place = f'x="{x(one.bytes) + 6:.1f}" y="{y(one.increase) - 6 - 10 * (number % 2):.1f}"'
        parts.append(f"<text {place}>{one.name}, {one.bytes / 1e6:.2f} MB</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"
