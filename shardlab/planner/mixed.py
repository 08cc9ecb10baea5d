"""The timeline of a step that runs some blocks again and not others, from one of each kind."""

from dataclasses import replace

from shardlab.plan import Bytes, Kind, Span, Timeline


def mixed(again: Timeline, other: Timeline, count: int) -> Timeline:
    """The first `count` blocks as in `again`, what comes after them as in `other`.

    The first, not the last: when their turn comes to run again, nothing is left of the others.
    """
    border = _entries(again).get(count + 1)
    if border is None:
        return again
    left = _difference(border, _entries(other)[count + 1])  # what the first blocks leave behind, less than in `other`
    return tuple(one if one.segment <= count else _beside(two, left) for one, two in zip(again, other, strict=True))


def _entries(timeline: Timeline) -> dict[int, Bytes]:
    return {span.segment: span.entry for span in timeline if span.phase == "forward"}


def _difference(one: Bytes, other: Bytes) -> dict[Kind, int]:
    return {kind: one.get(kind, 0) - other.get(kind, 0) for kind in {**one, **other}}


def _beside(span: Span, left: dict[Kind, int]) -> Span:
    def add(to: Bytes) -> Bytes:
        return {kind: to.get(kind, 0) + left.get(kind, 0) for kind in {**to, **left}}

    return replace(span, entry=add(span.entry), peak=add(span.peak), exit=add(span.exit))
