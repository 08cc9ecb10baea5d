"""What one micro-batch's forward and backward pass keeps alive, from the real model on fake tensors.

The `Trainable` itself runs, with its own recompute and its chunked head, on tensors that have shapes and no memory; a
dispatch mode follows every storage from the operation that makes it to its last reference, so also what autograd saves
and for how long. Nothing here knows a family of models or an operator's rules, but for the few kernels of torch that
allocate inside (`_scratch`).

Blocks that are equal are traced three times (the first, one between, the last) and the others follow by addition: the
bytes that a block leaves behind are the same for each.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from shardlab.errors import UserError
from shardlab.model.trainable import Recompute, Trainable
from shardlab.plan import ROOT, Bytes, Kind, ModelShape, ParameterShape, Precision, Span, Timeline

# What becomes of a weight's gradient: added at once to a buffer that is there already; handed on as soon as it is
# whole; or kept until its unit's backward pass has ended.
Gradients = Literal["buffers", "each", "units"]

_TRACED_BLOCKS = 3


def model_shape(module: Trainable) -> ModelShape:
    """The parameters of `module`, before anything is sharded, and the units they belong to."""
    count = len(module.blocks)
    units: list[tuple[int, nn.Module]] = list(enumerate(module.blocks, start=1))
    if module.tail is not None and not module.tied:
        units.append((count + 1, module.tail))
    if module.embedding is not None:
        units.append((count + 2, module.embedding))
    unit_of = {id(parameter): index for index, unit in units for parameter in unit.parameters()}
    shapes = tuple(
        ParameterShape(name, tuple(parameter.shape), parameter.requires_grad, unit_of.get(id(parameter), ROOT))
        for name, parameter in module.named_canonical()
    )
    return ModelShape(shapes, count, module.tail is not None)


class Tracer:
    """Traces one module. It puts fake tensors in place of the module's own, so the module is of no other use after."""

    def __init__(self, module: Trainable):
        self._module = module
        self._blocks = len(module.blocks)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._repeats = _repeats(module)
        if self._repeats:
            _keep_three(module)
        self._buffers = dict(module.named_buffers())
        self._originals = dict(module.named_parameters(remove_duplicate=False))

    def timeline(
        self, batch: Mapping[str, Tensor], precision: Precision, gradients: Gradients, recompute: Recompute
    ) -> Timeline:
        """The spans of one micro-batch shaped as `batch`, in order.

        Raises UserError where the step can't run on fake tensors.
        """
        self._module.set_recompute(recompute)
        packed = "position_ids" in batch and _is_packed(batch)
        with self._mode, _documents_unseen(packed=packed):
            self._fake_parameters(torch.bfloat16 if precision == "bf16" else torch.float32)
            fake = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()}
            try:
                spans = _Run(self._module, gradients).spans(fake)
            except Exception as error:
                # A forward pass that looks at values, which a trace has not; a stand-in kernel with other rules.
                raise UserError(
                    f"the memory of {self._module.architecture} can't be predicted: its step has no trace without "
                    f"memory ({type(error).__name__}: {' '.join(str(error).split())[:80]})"
                ) from error
        return tuple(_extended(spans, self._blocks)) if self._repeats else tuple(spans)

    def _fake_parameters(self, dtype: torch.dtype) -> None:
        made: dict[int, nn.Parameter] = {}
        for name, original in self._originals.items():
            if id(original) not in made:
                kind = dtype if original.is_floating_point() else original.dtype
                made[id(original)] = nn.Parameter(
                    torch.empty(original.shape, dtype=kind), requires_grad=original.requires_grad
                )
            owner, _, leaf = name.rpartition(".")
            self._module.get_submodule(owner)._parameters[leaf] = made[id(original)]
        for name, buffer in self._buffers.items():
            owner, _, leaf = name.rpartition(".")
            fake = torch.empty(buffer.shape, dtype=buffer.dtype)
            self._module.get_submodule(owner)._buffers[leaf] = fake


def _is_packed(batch: Mapping[str, Tensor]) -> bool:
    """Whether any row's positions start anew."""
    positions = batch["position_ids"]
    return bool((positions[:, 1:] != positions[:, :-1] + 1).any())


@contextmanager
def _documents_unseen(*, packed: bool) -> Iterator[None]:
    """Rows of one document each need no mask of their own; a fake tensor cannot say so, so it is said here."""
    find = masking_utils.find_packed_sequence_indices
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _repeats(module: Trainable) -> bool:
    """Whether the blocks are more than three, alike, and in a list that can be shortened."""
    if len(module.blocks) <= _TRACED_BLOCKS or _block_list(module) is None:
        return False
    return len({_signature(block) for block in module.blocks}) == 1


def _signature(block: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    # Families give some layers another mask or window, in attributes of their own names.
    settings = tuple(
        sorted(
            (f"{prefix}.{name}", repr(value))
            for prefix, child in block.named_modules()
            for name, value in vars(child).items()
            if isinstance(value, bool | int | float | str) and name != "layer_idx"
        )
    )
    return type(block), shapes, settings


def _block_list(module: Trainable) -> nn.ModuleList | None:
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    return next((found for found in lists if list(found) == module.blocks), None)


def _keep_three(module: Trainable) -> None:
    blocks = _block_list(module)
    assert blocks is not None
    del blocks[2:-1]
    module.blocks = list(blocks)


def _extended(spans: list[Span], blocks: int) -> Iterator[Span]:
    """The spans of `blocks` equal blocks from those of three."""
    extra = blocks - _TRACED_BLOCKS
    forward = {span.segment: span for span in spans if span.phase == "forward"}
    left = _difference(forward[3].entry, forward[2].entry)  # what a block leaves behind
    for span in spans:
        shift, number = 0, span.segment
        if number >= _TRACED_BLOCKS or (number == ROOT and span is spans[-1] and span.phase == "forward"):
            shift, number = extra, number + extra
        if span.segment != 2:
            yield _moved(span, number, left, shift)
        else:
            order = range(extra + 1) if span.phase == "forward" else reversed(range(extra + 1))
            yield from (_moved(span, 2 + index, left, index) for index in order)


def _difference(one: Bytes, other: Bytes) -> dict[Kind, int]:
    return {kind: one.get(kind, 0) - other.get(kind, 0) for kind in {**one, **other}}


def _moved(span: Span, number: int, left: Bytes, times: int) -> Span:
    def add(to: Bytes) -> Bytes:
        return {kind: to.get(kind, 0) + times * left.get(kind, 0) for kind in {**to, **left}}

    return Span(span.phase, number, add(span.entry), add(span.peak), add(span.exit))


class _Run:
    """One forward and backward pass, cut into spans at the borders of the segments."""

    def __init__(self, module: Trainable, gradients: Gradients):
        self._module = module
        self._gradients = gradients
        self._storages = _Storages()
        self._spans: list[Span] = []
        self._unit_of = {p.name: p.unit for p in model_shape(module).parameters}
        self._owned: dict[int, list[nn.Parameter]] = {}

    def spans(self, batch: Mapping[str, Tensor]) -> list[Span]:
        module, storages = self._module, self._storages
        module.train()
        if module.tail is not None:
            # Chunks of one size take the same memory, one after another: the first, a later and a last, shorter one.
            every = module.tail.chunks
            module.tail.chunks = lambda tokens: _ends(list(every(tokens)))  # type: ignore[method-assign]
        hooks = [hook for index, unit in self._segments() for hook in self._watch(index, unit)]
        hooks += self._take_gradients()
        try:
            with storages:
                self._enter("forward", ROOT)
                loss = module(batch, 1.0)
                self._enter("backward", self._tail if module.tail is not None else len(module.blocks))
                loss.backward()
                del loss
                self._close()
        finally:
            for hook in hooks:
                hook.remove()
            if module.tail is not None:
                del module.tail.chunks
                module.tail.weight_gradient = None
        return self._spans

    @property
    def _tail(self) -> int:
        return len(self._module.blocks) + 1

    def _segments(self) -> Iterator[tuple[int, nn.Module]]:
        yield from enumerate(self._module.blocks, start=1)
        if self._module.tail is not None:
            yield self._tail, self._module.tail

    def _watch(self, index: int, unit: nn.Module) -> Iterator[Any]:
        """The forward pass enters with the unit's call, the backward pass of what is before it with its input."""

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._span[0] == "backward":
                return  # recompute
            self._enter("forward", index)
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _gradient: self._enter("backward", index - 1))
                    break

        yield unit.register_forward_pre_hook(enter, with_kwargs=True)

    def _take_gradients(self) -> list[Any]:
        module, hooks = self._module, []
        for name, parameter in module.named_trainables():
            unit = self._unit_of[name]
            segment = unit if unit <= self._tail else ROOT
            self._owned.setdefault(segment, []).append(parameter)
            parameter.grad_dtype = torch.float32 if self._gradients == "buffers" else parameter.dtype
            parameter.grad = torch.empty_like(parameter, dtype=torch.float32) if self._gradients == "buffers" else None
            hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
        if self._gradients == "buffers" and module.tail is not None:
            module.tail.weight_gradient = module.tail.head.weight.grad
        return hooks

    def _arrived(self, parameter: Tensor) -> None:
        if self._gradients == "each":
            parameter.grad = None
        elif self._gradients == "units" and parameter.grad is not None:
            self._storages.rename(parameter.grad, "gradients")

    def _enter(self, phase: Literal["forward", "backward"], segment: int) -> None:
        if self._storages.began:
            self._close()
        self._span = (phase, segment)
        self._storages.kind = "temporaries" if phase == "backward" else "activations"
        if phase == "forward" and self._module.tail is not None and segment == self._tail:
            self._storages.kind = "head"
        self._storages.begin()

    def _close(self) -> None:
        """End the span; then its unit's gradients go."""
        phase, segment = self._span
        entry, peak, now = self._storages.end()
        if phase == "forward":
            # What does not outlive the span was never saved.
            passing = max(0, sum(peak.values()) - sum(now.values()))
            kind = self._storages.kind
            passing = min(passing, peak.get(kind, 0))
            peak = {**peak, kind: peak.get(kind, 0) - passing, "temporaries": peak.get("temporaries", 0) + passing}
        self._spans.append(Span(phase, segment, entry, peak, now))
        if phase == "backward" and self._gradients == "units":
            for parameter in self._owned.get(segment, ()):
                parameter.grad = None


def _ends(chunks: list[slice]) -> list[slice]:
    return chunks if len(chunks) <= 3 else [*chunks[:2], chunks[-1]]


class _Storages(TorchDispatchMode):
    """Live bytes of the storages that were made inside, by kind, and their highest sum since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.began = False
        self._sizes: dict[int, tuple[int, Kind]] = {}
        self._live: Counter[Kind] = Counter()
        self._total = 0
        self._highest = -1
        self._entry: Bytes = {}
        self._peak: Bytes = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        if not func._schema.is_mutable or "out" not in func._schema.overload_name:
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, Tensor):
                    self._add(value, given=args)
        self._note(_scratch(func, args, result))
        return result

    def _add(self, tensor: Tensor, given: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._before:
            return
        if any(isinstance(value, Tensor) and value.untyped_storage()._cdata == key for value in _flat(given)):
            self._before.add(key)  # a view of something that was there before: it outlives the trace
            return
        size = storage.nbytes()
        self._sizes[key] = (size, self.kind)
        self._live[self.kind] += size
        self._total += size
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        size, kind = self._sizes.pop(key)
        self._live[kind] -= size
        self._total -= size

    def rename(self, tensor: Tensor, kind: Kind) -> None:
        """Count `tensor`'s storage as another kind from here on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            size, old = self._sizes[key]
            self._sizes[key] = (size, kind)
            self._live[old] -= size
            self._live[kind] += size

    def _note(self, scratch: int = 0) -> None:
        if self._total + scratch > self._highest:
            self._highest = self._total + scratch
            self._peak = dict(self._live)
            if scratch:
                self._peak = {**self._peak, "temporaries": self._live["temporaries"] + scratch}

    def begin(self) -> None:
        """Start a new peak."""
        self.began = True
        self._entry = dict(self._live)
        self._highest = -1
        self._note()

    def end(self) -> tuple[Bytes, Bytes, Bytes]:
        """Live bytes at the beginning, at the highest point and now."""
        return self._entry, self._peak, dict(self._live)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


_BINARY = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"}


def _scratch(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a kernel of torch allocates and frees inside, where they are as large as its operands."""
    if func is torch.ops.aten.logsumexp.default:  # exp(x - max) whole
        return int(args[0].numel() * args[0].element_size())
    if func._schema.name.split("::")[1] in _BINARY:
        # On a CPU an operand of another type than the result's is converted first, whole.
        operands = [value for value in args[:2] if isinstance(value, Tensor) and value.dim() > 0]
        return sum(o.numel() * result.element_size() for o in operands if o.dtype != result.dtype)
    return 0
