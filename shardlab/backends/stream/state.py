"""The training state of a store as others see it: initial values in, fragments and whole tensors out."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlab.backends.module_state import buffer_fragments, check_tensors, load_buffers
from shardlab.backends.optimizer_state import check_kinds, plain_groups
from shardlab.backends.stream.direct import unnamed
from shardlab.backends.stream.layout import Part, Segment, overlaps
from shardlab.backends.stream.pipeline import Pipeline
from shardlab.backends.stream.store import Store
from shardlab.backends.stream.update import Update
from shardlab.model.trainable import Trainable
from shardlab.state.fragment import FROZEN, MASTER, Fragment, OptimizerState, StateReader
from shardlab.state.held import VALUES, Held, fragments_of, held_range, read_held
from shardlab.topology import Topology

Put = Callable[[Part, int, Mapping[str, Tensor]], None]


class StoredState:
    """What `store` holds, by the names of the module's tensors."""

    def __init__(self, store: Store, pipeline: Pipeline, module: Trainable, update: Update, optimizer: Optimizer):
        self._store = store
        self._pipeline = pipeline
        self._module = module
        self._update = update
        self._optimizer = optimizer

    def initialise(self, take: Callable[[str], Tensor]) -> None:
        """Write the initial values, one tensor in memory at a time: `take` gives each once, by name."""
        last: tuple[str, Tensor] | None = None

        def put(part: Part, start: int, states: Mapping[str, Tensor]) -> None:
            nonlocal last
            if last is None or last[0] != part.name:
                last = None  # before the next is made
                last = part.name, take(part.name).reshape(-1)
            for kind in states.keys() & set(VALUES):
                states[kind].copy_(last[1][start : start + states[kind].numel()])

        self._fill(put)

    def load(self, reader: StateReader) -> None:
        """See `Backend.load`."""
        check_tensors(self._module, reader)
        scalars, steps = reader.optimizer.scalars, {}
        for name, _ in self._module.named_trainables():
            stored = reader.kinds(name).difference(VALUES)
            if stored or name in scalars:
                check_kinds(name, stored, self._update.kinds, self._optimizer)
                steps[name] = int(scalars.get(name, {}).get("step", 1))

        def put(part: Part, start: int, states: Mapping[str, Tensor]) -> None:
            read_held(held_range(part.name, part.shape, start, states), reader)

        self._fill(put)
        self._update.steps = steps
        load_buffers(self._module, reader)

    def _fill(self, put: Put) -> None:
        """Write every file: `put(part, start, states)` fills the states of a range of a tensor, from zeros."""
        for segment in self._store.layout.segments:
            for trained, kinds in ((True, (MASTER, *self._update.kinds)), (False, (FROZEN,))):

                def give(
                    start: int,
                    stop: int,
                    planes: list[Tensor],
                    segment: Segment = segment,
                    trained: bool = trained,
                    kinds: tuple[str, ...] = kinds,
                ) -> None:
                    for part, where, first in overlaps(segment, start, stop, trained=trained):
                        put(part, first, {k: plane[where] for k, plane in zip(kinds, planes, strict=True)})

                self._pipeline.fill(segment, give, trained=trained)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`. They lie in files of their own without a name, not in memory."""
        self._pipeline.apply_pending()
        for name, parameter in self._module.named_canonical():
            whole = unnamed(self._store.directory, parameter.numel(), parameter.dtype).view(parameter.shape)
            for segment, part in self._parts(name):
                self._pipeline.copy_out(segment, part, whole.view(-1)[part.start : part.start + part.numel])
            yield name, whole

    def fragments(self, topology: Topology) -> Iterator[Fragment]:
        """See `Backend.fragments`. Applies what waits; the values are the files' own pages, read as they are used."""
        self._pipeline.apply_pending()
        updates = self._store.record.updates
        for name, _ in self._module.named_canonical():
            for segment, part in self._parts(name):
                kinds: tuple[str, ...] = (FROZEN,)
                if part.trained:
                    counted = self._update.steps.get(name, 0) + updates
                    kinds = (MASTER, *(self._update.kinds if counted else ()))
                yield from fragments_of(list(self._held(segment, part, kinds)))
        yield from buffer_fragments(self._module, topology)

    def _parts(self, name: str) -> Iterator[tuple[Segment, Part]]:
        for segment in self._store.layout.segments:
            yield from ((segment, part) for part in segment.parts if part.name == name)

    def _held(self, segment: Segment, part: Part, kinds: tuple[str, ...]) -> Iterator[Held]:
        where = slice(part.offset, part.offset + part.numel)
        if not part.numel:
            return
        if not part.trained:
            whole = self._store.frozen(segment.index).mapped(0, segment.frozen, self._store.form.frozen)
            yield from held_range(part.name, part.shape, part.start, {FROZEN: whole[where]})
            return
        file, planes = self._store.state(segment.index), {}
        for number, offset, one in self._store.form.places(segment.trained):
            if number >= len(kinds) or kinds[number] in planes:
                continue
            if one.dtype == torch.float32:
                planes[kinds[number]] = file.mapped(offset, segment.trained, one.dtype)[where]
            else:  # other backends know fp32 only
                planes[kinds[number]] = unnamed(self._store.directory, part.numel, torch.float32)
                self._pipeline.copy_out(segment, part, planes[kinds[number]], number)
        yield from held_range(part.name, part.shape, part.start, planes)

    def optimizer_state(self) -> OptimizerState:
        """See `Backend.optimizer_state`; updates that wait are counted."""
        updates = self._store.record.updates
        names = [name for group in self._optimizer.param_groups for name in group["names"]]
        counted = {name: count for name in names if (count := self._update.steps.get(name, 0) + updates)}
        adam = isinstance(self._optimizer, torch.optim.AdamW)
        scalars = {name: {"step": float(count)} for name, count in counted.items()} if adam else {}
        return OptimizerState(self._update.kinds if counted else (), scalars, plain_groups(self._optimizer))
