"""What `StreamBackend.prepare` and a window allocate, what the files take, and what a window moves to and from them.

Memory has a fixed part (slots, gradients' buffers, pieces), one that follows the window (its hidden states, masks, the
rows of the embedding that it uses), and the blocks' inputs, which go to the disk beyond `Stream.activation_bytes`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardlab.backends.placement import BF16, FP32, INT64, Setting, away_bytes, moment, span_name
from shardlab.backends.stream.boundaries import STAGED, spilled
from shardlab.backends.stream.direct import SECTOR
from shardlab.backends.stream.encoding import CHUNK, Format
from shardlab.backends.stream.layout import Layout, Segment, lay_out
from shardlab.backends.stream.pipeline import GRADIENTS, PIECE, SLOTS, WORKERS
from shardlab.backends.stream.store import disk_bytes
from shardlab.errors import UserError
from shardlab.model.head import CHUNK_TOKENS
from shardlab.plan import Bytes, Disk, Kind, ModelShape, Moment, Plan, Span

_SCORES = 4  # tensors of the head's scores at once: logits, what is made of them, a log-sum-exp's own, a gradient


def footprint(setting: Setting) -> Iterator[Moment]:
    """Every point of a window that could be the highest."""
    layout, size = lay_out(_streamed(setting.model)), setting.compute_size
    window = Window(setting)
    resident = _resident(setting, layout, window)
    for span in setting.timeline:
        name = span_name(span, setting.model)
        if span.segment == setting.model.tail:
            if span.phase == "forward":
                yield moment(name, resident, *_head(setting, layout, window, span))
        elif span.phase == "forward":
            # Beside it runs the update; the first one is checked against a copy of each piece.
            copies = WORKERS * CHUNK * FP32
            yield moment(name, resident, {"activations": window.hidden}, _passing(span), {"temporaries": copies})
        else:
            gradients = 2 * window.used // size * FP32 if span.segment == 0 else 0
            yield moment(name, resident, {"activations": window.hidden, "gradients": gradients}, _passing(span))


@dataclass(frozen=True)
class Moved:
    """Bytes that a window reads and writes in its forward and in its backward pass, once an update is to be applied."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def disk(setting: Setting) -> Disk:
    """Bytes that the files take, and those that a window moves."""
    layout, window, found = lay_out(_streamed(setting.model)), Window(setting), moved(setting)
    blocks = recomputed(setting.plan, setting.model.blocks)
    away = spilled(blocks, window.hidden, setting.plan.stream.activation_bytes)
    inputs = blocks * -(-window.hidden // SECTOR) * SECTOR if away else 0
    read, written = (a + b for a, b in zip(found.forward, found.backward, strict=True))
    own = away_bytes(setting) * setting.plan.accumulation
    return Disk(disk_bytes(_format(setting), layout) + inputs + own, read, written)


def recomputed(plan: Plan, blocks: int) -> int:
    """How many of the first blocks are run again; what the others save goes to the disk."""
    if plan.offload.activations != "disk" or plan.recompute_blocks is None:
        return blocks
    return min(blocks, plan.recompute_blocks)


def moved(setting: Setting) -> Moved:
    """What goes to and from the disk, by pass. The update is in the forward pass."""
    layout, window = lay_out(_streamed(setting.model)), Window(setting)
    form, size = _format(setting), window.hidden
    blocks = recomputed(setting.plan, setting.model.blocks)
    away = spilled(blocks, size, setting.plan.stream.activation_bytes) * -(-size // SECTOR) * SECTOR
    away += away_bytes(setting) * setting.plan.accumulation
    first = Counter([*layout.table, layout.root, *layout.blocks, layout.tail, *layout.head])
    again = Counter([*(layout.head if len(layout.head) > 1 else ()), *layout.blocks, layout.root])
    reads, writes = [0, away], [away, 0]
    for segment in layout.segments:
        masters = segment.trained * form.master.itemsize
        weights = masters + segment.frozen * form.frozen.itemsize
        gradient, state = form.gradient.size(segment.trained), form.state_bytes(segment.trained)
        # The update reads the moments and the gradient beside the masters.
        reads[0] += first[segment.index] * weights + state - masters + gradient
        writes[0] += state
        reads[1] += again[segment.index] * weights
        writes[1] += gradient
        if layout.tied and segment.role == "table":  # the head's gradient comes back, and the embedding's is added
            reads[1] += gradient
            writes[1] += gradient
    return Moved((reads[0], writes[0]), (reads[1], writes[1]))


class Window:
    """Bytes that follow the window's size. Of the whole window: `hidden` is one hidden state of every micro-batch."""

    def __init__(self, setting: Setting):
        count = setting.plan.accumulation
        first, block = (next(s for s in setting.timeline if s.phase == "forward" and s.segment == n) for n in (0, 1))
        border = _total(block.exit) - _total(block.entry)
        self.hidden = count * border
        self.captured = count * (_total(first.exit) - border)  # masks, rotary tables
        width = _width(setting.model)
        self.tokens = self.hidden // (width * setting.compute_size)
        rows = next(p.shape[0] for p in setting.model.parameters if p.name == setting.model.table)
        self.used = min(rows, self.tokens) * width * setting.compute_size


def _resident(setting: Setting, layout: Layout, window: Window) -> dict[Kind, int]:
    form = _format(setting)
    small = [layout.segments[layout.root], layout.segments[layout.tail]]  # held beside the slots at times
    budget = setting.plan.stream.activation_bytes
    blocks = recomputed(setting.plan, setting.model.blocks)
    away = spilled(blocks, window.hidden, budget)
    kept = (blocks - away) * window.hidden
    staged = STAGED * -(-window.hidden // SECTOR) * SECTOR if away else 0
    batches = 4 * window.tokens * INT64  # tokens, targets, positions, places of the tokens in the rows that are used
    return {
        "parameters": (SLOTS * layout.largest + sum(s.elements for s in small)) * setting.compute_size + window.used,
        "gradients": (GRADIENTS * layout.largest_trained + sum(s.trained for s in small)) * FP32,
        "communication": WORKERS * (form.buffer_bytes(_piece(layout)) + form.scratch_bytes(_piece(layout))),
        # An allowance for what malloc keeps for each thread: without it 62M parameters took 241 MiB, of 242 predicted.
        "temporaries": WORKERS * _piece(layout) * FP32,
        "activations": kept + staged + window.captured + batches,
    }


def _head(setting: Setting, layout: Layout, window: Window, span: Span) -> list[Bytes]:
    """The hidden states, their gradient, and what the loss makes in passing."""
    size = setting.compute_size
    if len(layout.head) == 1:
        return [{"activations": window.hidden, "head": window.hidden}, _passing(span)]
    rows = max(_rows(layout.segments[index]) for index in layout.head)
    passing = min(CHUNK_TOKENS, window.tokens) * rows * FP32 * _SCORES
    product = rows * _width(setting.model) * size if size == BF16 else 0
    gradient = window.hidden // size * FP32
    said = 3 * setting.taught  # joined over the window, with the student's scores of the same tokens
    head = window.hidden + gradient + said
    return [{"activations": 2 * window.hidden, "head": head, "temporaries": passing + product}]


def _passing(span: Span) -> Bytes:
    """What a segment takes beyond what was there when it began."""
    return {kind: max(0, size - span.entry.get(kind, 0)) for kind, size in span.peak.items()}


def _format(setting: Setting) -> Format:
    kept, frozen = setting.plan.stream, torch.bfloat16 if setting.compute_size == BF16 else torch.float32
    return Format(setting.states, frozen, kept.masters, kept.moments, kept.gradients)


def _streamed(model: ModelShape) -> ModelShape:
    """Raises UserError for what has no blocks, table or head to stream."""
    if not model.blocks or model.table is None or model.head is None:
        raise UserError("backend stream needs a causal language model with a list of blocks and an embedding")
    return model


def _piece(layout: Layout) -> int:
    return min(PIECE, layout.largest)


def _rows(segment: Segment) -> int:
    rows = segment.rows()
    return rows.stop - rows.start


def _width(model: ModelShape) -> int:
    return next(p.shape[1] for p in model.parameters if p.name == model.table)


def _total(sizes: Bytes) -> int:
    return sum(sizes.values())
