"""What `FSDPBackend.prepare` and a step of it allocate: torch's `fully_shard`, read in torch 2.13.

A unit is gathered into one flat buffer and copied out of it into its parameters. In the forward pass the flat buffer
stays until the next unit's has arrived; in the backward pass the next unit's is there already (it is prefetched). A
unit's gradients are whole until its backward pass has ended, then copied into one buffer and reduce-scattered; that
buffer stays until the next unit's turn. gloo reduces a copy of it. Where ranks share memory, those buffers lie in
it, for as long as the run lasts, and there is no copy.
"""

from collections.abc import Iterator
from itertools import product

from shardlab.backends.placement import (
    FP32,
    Setting,
    Standing,
    largest,
    moment,
    pinned,
    shares_memory,
    span_name,
    trained,
    update_temporaries,
)
from shardlab.plan import ROOT, Bytes, Kind, Moment, ParameterShape, Span

GRADIENTS = "units"


def footprint(setting: Setting) -> Iterator[Moment]:
    """Shards of masters, gradients and moments; one or two units whole at a time."""
    yield from _Sharded(setting).moments()


def standing(setting: Setting) -> Standing:
    """Shards; before that one unit after another whole, and one tensor after another at the end."""
    return _Sharded(setting).standing()


class _Sharded:
    def __init__(self, setting: Setting):
        self._setting = setting
        self._model = setting.model
        self._ranks = setting.plan.world_size // setting.plan.replicas
        self._tail = setting.model.tail
        self._offload = setting.accelerator and setting.plan.offload.parameters == "cpu"
        self._shared = shares_memory(setting)

    def _shard(self, parameters: tuple[ParameterShape, ...]) -> int:
        """Elements on one rank: rows are shared out, the last share padded."""
        return sum(-(-p.shape[0] // self._ranks) * (p.numel // max(1, p.shape[0])) for p in parameters if p.shape)

    def _whole(self, unit: int) -> int:
        """Bytes of a unit's gathered parameters."""
        return self._shard(self._model.unit(unit)) * self._ranks * self._setting.compute_size

    def _flat(self, unit: int) -> int:
        """Bytes of the buffer that they are gathered in; a single rank copies without one."""
        return self._whole(unit) if self._ranks > 1 and not self._shared else 0

    def _reduced(self, unit: int) -> int:
        """Bytes of the buffer that a unit's gradients are reduced from."""
        return 0 if self._shared else self._gradients(unit)

    def _gradients(self, unit: int) -> int:
        return self._shard(trained(self._model.unit(unit))) * self._ranks * self._setting.reduced_size

    def _shared_memory(self) -> int:
        """Bytes of shared memory that the rank touches which touches most.

        Those of the largest unit at its beginning; its own piece of it, for its gradients; its part of every peer's.
        """
        if not self._shared:
            return 0
        units, ranks = range(self._model.embedding + 1), self._ranks  # the root's is 0
        whole, sizes = max(map(self._whole, units)), [self._gradients(unit) for unit in units]
        piece, most = max(sizes), 0
        for rank in range(ranks):
            parts = [(0, whole), (rank * piece, rank * piece + piece)]
            for start, size in product(range(0, ranks * piece, max(1, piece)), sizes):
                parts.append((start + rank * size // ranks, start + (rank + 1) * size // ranks))
            total = reached = 0
            for start, stop in sorted(parts):
                total += max(0, stop - max(start, reached))
                reached = max(reached, stop)
            most = max(most, total)
        return most

    def _shards(self) -> dict[Kind, int]:
        everything, trainable = self._model.parameters, trained(self._model.parameters)
        return {
            "parameters": self._shard(everything) * self._setting.state_size,
            "moments": self._shard(trainable) * self._setting.state_size * self._setting.states,
            "communication": self._shared_memory(),
        }

    def _pinned(self, parameters: tuple[ParameterShape, ...]) -> int:
        """Bytes of these parameters' shards in pinned memory, one by one."""
        return sum(pinned(self._shard((p,)) * self._setting.state_size) for p in parameters)

    def _away(self, shards: dict[Kind, int]) -> dict[Kind, int]:
        """`shards` on the host; moments are made there, and not pinned."""
        return shards | {"parameters": self._pinned(self._model.parameters)}

    def standing(self) -> Standing:
        shards, model = self._shards(), self._model
        frozen = sum(self._shard((p,)) for p in model.parameters if not p.trainable)
        kept = self._shard(trained(model.parameters)) * (1 + self._setting.states) + frozen
        unit = max(sum(p.numel for p in model.unit(one)) for one in range(model.embedding + 1))
        return Standing(
            resident={} if self._offload else shards,
            host=self._away(shards) if self._offload else {},
            # A unit is whole, then its shards are copied out of it.
            building=(0 if self._offload else shards["parameters"]) + unit * FP32,
            saved=-(-kept * FP32 // self._setting.plan.replicas),
            copied=True,
            passing=2 * largest(model.parameters) * FP32,  # gathered by ranks, then put together
        )

    def moments(self) -> Iterator[Moment]:
        """Of a micro-batch and of the update, in order."""
        trainable, shards = trained(self._model.parameters), self._shards()
        gradients = self._shard(trainable) * self._setting.state_size
        resident, host = shards, dict[Kind, int]()
        if self._offload:
            resident, host = {}, self._away(shards) | {"gradients": self._pinned(trained(self._model.parameters))}
        collected = gradients if self._setting.plan.accumulation > 1 and not self._offload else 0
        before = 0  # the buffer of the unit before, still being reduced
        for span in self._setting.timeline:
            if span.phase == "forward":
                own: dict[Kind, int] = {"gradients": collected, "communication": self._forward(span.segment)}
                yield moment(span_name(span, self._model), resident, own, span.peak, host=host)
                continue
            around = self._backward(span.segment)
            own = {"gradients": collected, "communication": around + before}
            yield moment(span_name(span, self._model), resident, own, span.peak, host=host)
            for unit in self._units(span.segment):
                yield from self._reduce(span, unit, {**resident}, collected, around, host)
                before = self._reduced(unit) or before
                if self._setting.plan.accumulation == 1 and not self._offload:
                    collected += self._shard(trained(self._model.unit(unit))) * self._setting.state_size
        shares = [self._shard((p,)) for p in trainable]
        passing = update_temporaries(self._setting, sum(shares), max(shares, default=0), self._setting.state_size)
        update: Bytes = {
            "temporaries": 0 if self._offload and self._setting.loop != "shardlab" else passing,
            "gradients": 0 if self._offload else gradients,
        }
        yield moment("the first update", resident, update, host=host)

    def _units(self, segment: int) -> tuple[int, ...]:
        return (self._model.embedding, ROOT) if segment == ROOT else (segment,)

    def _forward(self, segment: int) -> int:
        always = self._whole(ROOT)
        if segment == ROOT:
            return always + self._whole(self._model.embedding) + self._flat(self._model.embedding)
        keeps = self._setting.plan.reshard_after_forward
        before = 0 if keeps else sum(self._whole(unit) for unit in range(1, min(segment, self._tail)))
        return always + before + self._whole(segment) + (self._flat(segment) or self._flat(ROOT))

    def _backward(self, segment: int) -> int:
        """Gathered while a segment's backward pass runs."""
        always = self._whole(ROOT)
        if segment == ROOT:
            return always
        if not self._setting.plan.reshard_after_forward:
            return always + sum(self._whole(unit) for unit in range(1, segment + 1))
        ahead = self._flat(segment - 1) if segment > 1 else 0
        return always + self._whole(segment) + ahead

    def _reduce(
        self, span: Span, unit: int, resident: Bytes, collected: int, around: int, host: Bytes
    ) -> Iterator[Moment]:
        """A unit's parameters go, its gradients are copied, then the copy is reduced and they go."""
        buffer, gone = self._reduced(unit), 0 if unit == ROOT else self._whole(unit)
        if not self._gradients(unit):
            return
        name = f"reduce-scatter after the {span_name(span, self._model)}"
        around -= gone if span.segment != ROOT else 0
        held: Bytes = {"gradients": collected}
        yield moment(name, resident, held, span.exit, {"communication": around + buffer}, host=host)
        left: Bytes = {kind: size for kind, size in span.exit.items() if kind != "gradients"}
        part = self._gradients(unit) // self._ranks
        copy = 0 if self._setting.accelerator or self._ranks == 1 else buffer
        reduced: Bytes = {"communication": around + buffer + copy, "gradients": collected + part}
        yield moment(name, resident, left, reduced, host=host)
