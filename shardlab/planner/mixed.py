"""The timeline of a step that runs some blocks again and not others, from one of each kind."""

from dataclasses import replace

from shardlab.plan import Bytes, Kind, Span, Timeline


def mixed(again: Timeline, other: Timeline, count: int) -> Timeline:
    """The first `count` blocks as in `again`, what comes after them as in `other`.

    The first, not the last: when their turn comes to run again, nothing is left of the others.
    """
    if not any(span.segment == count + 1 for span in again):
        return again
    # What the first blocks leave behind, less than in `other`: while the blocks' forward pass goes on, and from the
    # head on, when the arguments that they will run again with are theirs alone.
    last = max(span.segment for span in again)
    blocks = _difference(_span(again, "forward", count + 1).entry, _span(other, "forward", count + 1).entry)
    later = _difference(_span(again, "backward", count + 1).exit, _span(other, "backward", count + 1).exit)
    return tuple(
        one
        if one.segment <= count
        else _beside(two, blocks if two.phase == "forward" and two.segment < last else later)
        for one, two in zip(again, other, strict=True)
    )


def _span(timeline: Timeline, phase: str, segment: int) -> Span:
    return next(span for span in timeline if (span.phase, span.segment) == (phase, segment))


def _difference(one: Bytes, other: Bytes) -> dict[Kind, int]:
    return {kind: one.get(kind, 0) - other.get(kind, 0) for kind in {**one, **other}}


def _beside(span: Span, left: dict[Kind, int]) -> Span:
    def add(to: Bytes) -> Bytes:
        return {kind: to.get(kind, 0) + left.get(kind, 0) for kind in {**to, **left}}

    return replace(span, entry=add(span.entry), peak=add(span.peak), exit=add(span.exit))
