"""A causal language model, one segment in memory at a time: calibration rows go through it, and each is changed.

A segment's inputs come from the changed segments before it, so what one loses the next can make up for. Rows that were
held out go through the model twice, as it was and as it becomes, so that what the change costs is known at the end
without either model ever being whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from shardlab.backends.materialize import move_buffers
from shardlab.compress.quality import Comparison, Quality
from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.model.deferred import Weights
from shardlab.model.loaded import Loaded, around_blocks, names_by_identity
from shardlab.model.segments import Capture
from shardlab.model.trainable import CausalLM, make_trainable
from shardlab.recipe import ModelSection

Batch = Mapping[str, Tensor]
Written = Iterator[tuple[str, Tensor]]
Trial = TypeVar("Trial")


@dataclass
class Segment:
    """The embedding, a block, or the head with the norms before it, with its weights in memory in fp32."""

    name: str  # in the user's model: "model.layers.3"; "" for what stands around the blocks
    module: nn.Module
    parameters: dict[str, nn.Parameter]  # by the user's names; a tied head's weight is in the embedding's alone
    linears: dict[str, nn.Linear]  # by the user's names, without ".weight"
    observe: Callable[[], None] = field(repr=False)
    """Run the calibration rows through the segment as it is now: hooks on its layers see what they are given."""
    gone: bool = False  # set by a change that leaves the block out: rows then pass it by


Change = Callable[[Segment], Written]
"""Changes a segment's weights in place, and yields (name, tensor) of all that is to be written for it."""


@dataclass
class _Rows:
    """One batch on its way: what the blocks are called with, and the hidden states (batch, sequence, hidden)."""

    batch: Batch
    capture: Capture
    hidden: Tensor


class Walk:
    """One pass over the model in a directory."""

    def __init__(
        self,
        directory: Path,
        calibration: Sequence[Batch],
        held_out: Sequence[Batch],
        *,
        sequence_length: int,
        device: torch.device | None = None,
    ):
        """Reads no weights yet. Raises UserError for a directory that is no causal language model's."""
        self._device = device or torch.device("cpu")
        model, self._weights = build_model(
            ModelSection(path=str(directory)), vocabulary=1, eos_token_id=None, sequence_length=sequence_length, seed=0
        )
        made = make_trainable(model)
        if not isinstance(made, CausalLM):
            raise UserError(f"{directory} is not a causal language model")
        self._model: CausalLM = made
        self._model.eval()
        move_buffers(self._model, self._device)
        self.config: Any = self._model.config
        self.tied = self._model.tied
        self.blocks = len(self._model.blocks)
        self._names = names_by_identity(self._model)
        self._layers = {
            id(module): self._names[id(module.weight)].removesuffix(".weight")
            for module in self._model.modules()
            if isinstance(module, nn.Linear)
        }
        self._head_name = self._layers[id(self._model.tail.head)]
        for alias, canonical in self._model.aliases.items():
            if canonical == f"{self._head_name}.weight":
                self._head_name = alias.removesuffix(".weight")
        self._calibration = calibration
        self._held_out = held_out
        self._quality: Quality | None = None

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of the blocks by the user's name, in order; then the head."""
        shapes = {}
        for block in self._model.blocks:
            for name, linear in self._linears(block).items():
                shapes[name] = (linear.out_features, linear.in_features)
        return shapes

    def linears_of_blocks(self) -> list[dict[str, tuple[int, int]]]:
        """The same for each block by itself."""
        return [
            {name: (linear.out_features, linear.in_features) for name, linear in self._linears(block).items()}
            for block in self._model.blocks
        ]

    @property
    def blocks_name(self) -> str:
        """Of the list of blocks in the user's model, such as "model.layers"."""
        return self._model.anatomy.blocks

    def block_shapes(self, index: int) -> dict[str, torch.Size]:
        """Of the tensors of a block, by the user's names."""
        return {self._names[id(parameter)]: parameter.shape for parameter in self._model.blocks[index].parameters()}

    def shapes(self) -> dict[str, torch.Size]:
        """Of all tensors, tied ones once."""
        return dict(self._model.shapes)

    def head(self) -> tuple[str, tuple[int, int]]:
        """The head's own name, though it may be tied, and (tokens, hidden size)."""
        head = self._model.tail.head
        return self._head_name, (head.out_features, head.in_features)

    def left_alone(self) -> list[str]:
        """Matrices of the blocks that belong to no linear layer: experts fused into one tensor, GPT-2's own layers."""
        found = []
        for block in self._model.blocks:
            linear = {id(module.weight) for module in block.modules() if isinstance(module, nn.Linear)}
            found += [self._names[id(p)] for p in block.parameters() if p.dim() > 1 and id(p) not in linear]
        return found

    @torch.no_grad()
    def run(self, change: Change, *, unties: bool = False, judged: bool = True) -> Written:
        """Go through the model; yields what `change` yields, segment by segment.

        `quality` is there afterwards, unless it is not `judged`: then the held-out rows stay out of it.

        `unties`: of a tied model, the head is changed and written on its own. Without it the embedding's change is the
        head's. Raises UserError naming the segment where weights or activations are not finite.
        """
        table = self._model.table
        assert table is not None
        around, held_out = around_blocks(self._model), self._held_out if judged else ()
        with self._loaded(around) as loaded:
            before = [self._start(batch) for batch in held_out]
            segment = self._segment("", self._model.body, loaded.parameters, linears={}, observe=lambda: None)
            yield from change(segment)
            rows = [self._start(batch) for batch in self._calibration]
            after = [self._start(batch) for batch in held_out]
            weight = table.weight
            assert isinstance(weight, Tensor)
            shared = weight.detach() if self.tied and not unties else None
        for index, block in enumerate(self._model.blocks):
            name = self._block_name(index)
            with self._loaded(block) as loaded:
                for one in before:
                    self._advance(one, index, block)

                def observe(index: int = index, block: nn.Module = block) -> None:
                    for one in rows:
                        one.capture.run_block(index, block, one.hidden)

                segment = self._segment(name, block, loaded.parameters, self._linears(block), observe)
                yield from change(segment)
                for one in [] if segment.gone else [*rows, *after]:
                    self._advance(one, index, block)
            for one in [*rows, *after]:
                if not bool(one.hidden.isfinite().all()):
                    raise UserError(f"{name} gives values that are not finite for rows of the calibration text")
        tail = self._model.tail
        with self._loaded(tail) as loaded:
            reference = [self._final(one.hidden) for one in before]

            def observe_head() -> None:
                for one in rows:
                    for part in self._final(one.hidden).split(tail.chunk_tokens):
                        tail.head(part)

            original = tail.head.weight.detach().clone() if held_out else None
            name = self.head()[0]
            own = {n: p for n, p in loaded.parameters.items() if p is not tail.head.weight}
            if shared is None:
                own[f"{name}.weight"] = cast(nn.Parameter, tail.head.weight)
            yield from change(
                self._segment("", tail, own, {} if shared is not None else {name: tail.head}, observe_head)
            )
            if original is not None:
                finals = ((self._final(one.hidden), one.batch) for one in after)
                self._quality = self._compare(reference, finals, original, shared)

    @torch.no_grad()
    def try_each(
        self, trials: Callable[[Segment], Iterator[Trial]], batches: Sequence[Batch]
    ) -> Iterator[tuple[Trial, Quality]]:
        """What each trial would cost if nothing else were changed, over the rows of `batches`.

        `trials` gets a block, or the head, and changes its weights in place before each thing that it yields; in the
        end they are as they were. In memory are one block and the hidden states of another block's trials.
        """
        tail = self._model.tail
        with self._loaded(around_blocks(self._model)):
            rows = [self._start(batch) for batch in batches]
        inputs = [one.hidden for one in rows]
        for index, block in enumerate(self._model.blocks):
            with self._loaded(block):
                for one in rows:
                    self._advance(one, index, block)
        with self._loaded(tail) as loaded:
            reference = [self._final(one.hidden) for one in rows]
            original = tail.head.weight.detach().clone()
            segment = self._segment("", tail, loaded.parameters, {self.head()[0]: tail.head}, lambda: None)
            for trial in trials(segment):
                yield trial, self._compare(reference, zip(reference, batches, strict=True), original, None)
        for one, hidden in zip(rows, inputs, strict=True):
            one.hidden = hidden
        for index, block in enumerate(self._model.blocks):
            with self._loaded(block) as loaded:
                segment = self._segment(
                    self._block_name(index), block, loaded.parameters, self._linears(block), lambda: None
                )
                tried = [
                    (trial, [replace(one, hidden=one.capture.run_block(index, block, one.hidden)) for one in rows])
                    for trial in trials(segment)
                ]
                for one in rows:
                    self._advance(one, index, block)
            for further in range(index + 1, self.blocks):
                later = self._model.blocks[further]
                with self._loaded(later):
                    for _, changed in tried:
                        for one in changed:
                            self._advance(one, further, later)
            with self._loaded(tail):
                for trial, changed in tried:
                    finals = ((self._final(one.hidden), one.batch) for one in changed)
                    yield trial, self._compare(reference, finals, original, None)

    @property
    def quality(self) -> Quality | None:
        """None before the end of `run`, and where nothing was held out."""
        return self._quality

    def _segment(
        self,
        name: str,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        linears: dict[str, nn.Linear],
        observe: Callable[[], None],
    ) -> Segment:
        for parameter_name, parameter in parameters.items():
            if not bool(parameter.isfinite().all()):
                raise UserError(f"{parameter_name} has values that are not finite")
        return Segment(name, module, parameters, linears, observe)

    def _start(self, batch: Batch) -> _Rows:
        moved = {name: tensor.to(self._device) for name, tensor in batch.items()}
        captured = self._model.capture(moved)
        return _Rows(moved, captured, captured.hidden)

    def _advance(self, rows: _Rows, index: int, block: nn.Module) -> None:
        rows.hidden = rows.capture.run_block(index, block, rows.hidden)

    def _final(self, hidden: Tensor) -> Tensor:
        """What the head is given, (tokens, hidden)."""
        for norm in self._model.tail.norms:
            hidden = norm(hidden)
        return hidden.reshape(-1, hidden.shape[-1])

    def _compare(
        self,
        reference: Sequence[Tensor],
        after: Iterable[tuple[Tensor, Batch]],
        original: Tensor,
        shared: Tensor | None,
    ) -> Quality:
        """`shared`: the changed embedding, where it is the head; else the head is as it was changed."""
        tail, comparison = self._model.tail, Comparison()
        for first, (second, batch) in zip(reference, after, strict=True):
            targets = batch["targets"].reshape(-1)
            for chunk in tail.chunks(len(targets)):
                valid = targets[chunk] != IGNORED
                given, bias = second[chunk][valid], tail.head.bias
                before = nn.functional.linear(first[chunk][valid], original, bias)
                # One row of tokens, as in a forward pass: inputs of two dims would be rounded by one scale for all.
                now = tail.head(given[None])[0] if shared is None else nn.functional.linear(given, shared, bias)
                comparison.add(tail.transform(before), tail.transform(now), targets[chunk][valid])
        return comparison.quality()

    def _loaded(self, module: nn.Module) -> Loaded:
        return Loaded(module, self._names, self._weights, self._device)

    def _block_name(self, index: int) -> str:
        return f"{self._model.anatomy.blocks}.{index}"

    def _linears(self, block: nn.Module) -> dict[str, nn.Linear]:
        return {self._layers[id(module)]: module for module in block.modules() if isinstance(module, nn.Linear)}

    @property
    def weights(self) -> Weights:
        """Where the values come from."""
        return self._weights
