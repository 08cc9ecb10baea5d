"""Build a module without its weights, and remember how each weight is initialised.

A module is constructed with its parameters on the meta device while every in-place operation on them is recorded
(`normal_`, `zero_`, a row set to zero, ...). A parameter is later made alone by replaying its own operations with a
generator seeded by its name. So initial weights do not depend on the backend, the world size or the order, each rank
can make its shards one tensor at a time, and whatever rule a model's code has for its weights holds without being
known here. Buffers are computed for real by the model's own constructor, so they are right on every rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.model.randomness import name_seed

# Operations that overwrite all that they are applied to: what came before them no longer matters.
_OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "log_normal_", "cauchy_"}


class Weights(Protocol):
    """Initial values by tensor name, one tensor at a time."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name`, fp32 (or its integer dtype), on the CPU. Raises KeyError if there is none."""
        ...


@dataclass(frozen=True)
class _Operation:
    """One recorded in-place operation on a view of a parameter."""

    function: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply(self, target: Tensor, generator: torch.Generator) -> None:
        kwargs = dict(self.kwargs)
        if any(argument.name == "generator" for argument in self.function._schema.arguments):
            kwargs["generator"] = generator
        self.function(target.as_strided(self.size, self.stride, self.offset), *self.args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Records in-place operations on meta tensors, by the storage that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[_Operation]] = defaultdict(list)
        self.unknown: set[int] = set()  # storages that took values which a replay can't make
        self._alive: list[torch.UntypedStorage] = []  # a freed storage's address could be taken by another

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, Tensor) and target.is_meta:
            storage = target.untyped_storage()
            key = storage._cdata
            self._alive.append(storage)
            rest = (*args[1:], *kwargs.values())
            if any(isinstance(value, Tensor) and value.is_meta for value in rest):
                self.unknown.add(key)
            else:
                operation = _Operation(
                    func, tuple(target.size()), target.stride(), int(target.storage_offset()), args[1:], kwargs
                )
                if (
                    func._schema.name.split("::")[1] in _OVERWRITES
                    and target.numel() * target.element_size() == storage.nbytes()
                ):
                    self.operations[key].clear()
                    self.unknown.discard(key)
                self.operations[key].append(operation)
        return result


class DeferredWeights:
    """Initial values made by replaying what a module's own code did to its meta parameters."""

    def __init__(
        self, seed: int, shapes: dict[str, tuple[torch.Size, torch.dtype]], programs: dict[str, list[_Operation]]
    ):
        self._seed = seed
        self._shapes = shapes
        self._programs = programs

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        shape, dtype = self._shapes[name]
        value = torch.empty(shape, dtype=dtype)
        # Always generated on the CPU: the same numbers whatever device the run is on.
        generator = torch.Generator().manual_seed(name_seed(self._seed, name))
        with torch.no_grad():
            for operation in self._programs[name]:
                operation.apply(value, generator)
        return value


class ModuleWeights:
    """Initial values that a real module already holds."""

    def __init__(self, module: nn.Module):
        self._values = dict(module.named_parameters(remove_duplicate=False))

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        value = self._values[name].detach().cpu()
        return value.float() if value.is_floating_point() else value


def build_deferred(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Weights]:
    """Construct a module and the source of its initial weights.

    Returns the module with its parameters on the meta device where every one of them can be made by replay. Where one
    can't (its values come from arithmetic outside an initialiser), the module is built for real, on the CPU, from
    `seed`.
    """
    recorder = _Recorder()
    with _fixed_generator(seed), meta_parameters(), recorder:
        module = build()
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    programs: dict[str, list[_Operation]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = parameter.untyped_storage()._cdata
        operations = recorder.operations.get(key, [])
        if key in recorder.unknown or not operations or not _overwrites(operations[0], parameter):
            with _fixed_generator(seed):
                module = build()
            return module, ModuleWeights(module)
        shapes[name] = (parameter.shape, parameter.dtype)
        programs[name] = list(operations)
    return module, DeferredWeights(seed, shapes, programs)


def _overwrites(operation: _Operation, parameter: nn.Parameter) -> bool:
    name = operation.function._schema.name.split("::")[1]
    return name in _OVERWRITES and operation.size == tuple(parameter.shape)


@contextmanager
def _fixed_generator(seed: int) -> Iterator[None]:
    """The CPU generator at `seed` inside, as it was before outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Put each parameter on the meta device as it is registered; buffers stay real.

    Accelerate's `init_empty_weights` does the same but makes a new parameter at each registration, which unties tied
    ones.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
