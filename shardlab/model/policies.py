"""What a block keeps for its backward pass, and what is run again instead.

- none: all that autograd saves.
- selective: by operator. Kept are the results of attention and of every other matrix product, the first one included;
  the rest (norms, activations, rotations, the other products) is run again from them in the backward pass. The same
  choice as torchtitan's.
- full: the block's input alone.

Whatever is run again gives the same bits, dropout included: a block seeds its random numbers itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from shardlab.model.saved import Saved
from shardlab.plan import Recompute

_ATEN = torch.ops.aten
# What linear layers become. Batched products are not among them: those are attention written out, whose scores are
# larger than all else, and experts.
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}
_ATTENTION = "aten::_scaled_dot_product"


def run(
    policy: Recompute,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    saved: Saved | None = None,
) -> Any:
    """`function(*args, **kwargs)`, its backward pass by `policy`; with `saved`, what is kept for that goes there.

    What is run again ends with the last tensor that is needed (torch's early stop): a block's last product is not
    repeated, and modules that are left so are left without their hooks.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saved.hooks() if saved is not None else nullcontext():
        if policy == "none":
            return function(*args, **kwargs)
        options: dict[str, Any] = {}
        if policy == "selective":
            options, function = {"context_fn": partial(_selective, saved)}, _with_free_output(function)
        # Not re-entrant: gradients also flow where the embedding below is frozen.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _with_free_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of whose output nothing is kept: who called it may do with it as it likes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output, results = function(*args, **kwargs), kept()
        assert results is not None
        results.forget(output)
        return output

    return call


@dataclass
class _Result:
    """One that could be kept, in the order in which they are made; `value` None: it is to be made again."""

    made_by: Any
    value: Any


@dataclass
class Kept:
    """The results that one block keeps: put in its forward pass, taken when it is run again.

    With `saved` they are there in between.
    """

    saved: Saved | None = None
    _results: list[_Result] = field(default_factory=list)
    _by_storage: dict[int, _Result] = field(default_factory=dict)
    _again: bool = False
    _next: int = 0
    _products: int = 0

    def take(self, made_by: Any) -> Any:
        """What was kept of the next result; None in the forward pass, and where it is to be made again.

        Raises RuntimeError where another operator comes than in the forward pass.
        """
        if not self._again:
            return None
        found = self._results[self._next]
        self._next += 1
        if found.made_by is not made_by:
            raise RuntimeError(f"recompute ran {made_by} where the forward pass had run {found.made_by}")
        value, found.value = found.value, None  # whoever runs the block a third time makes it anew
        return value if self.saved is None or value is None else tree_map(self.saved.unpack, value)

    def put(self, made_by: Any, value: Any) -> None:
        """Keep the next result, or note with None that it is not kept. Does nothing when a block is run again."""
        if self._again:
            return
        # Without autograd's record of it, which would keep the graph.
        result = _Result(made_by, tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, value))
        self._results.append(result)
        for tensor in _tensors(result.value):
            self._by_storage[_storage(tensor)] = result

    def forget(self, values: Any) -> None:
        """Keep nothing that shares memory with the tensors in `values`: they are, or may be, changed in place.

        Counters of changes would not do: DeepSpeed's linear adds its bias to what `_unsafe_view` gives of the product,
        which counts for itself.
        """
        for tensor in _tensors(values):
            result = self._by_storage.pop(_storage(tensor), None)
            if result is not None:
                result.value = None

    def result(self, made_by: Any, make: Callable[[], Any], *, keep: bool) -> Any:
        """What was kept of the next result, or what `make` gives."""
        value = self.take(made_by)
        if value is None:
            value = make()
        self.put(made_by, value if keep else None)
        return value

    def product(self, made_by: Any, make: Callable[[], Any]) -> Any:
        """The same for a matrix product, of which every other one is kept."""
        self._products += 1
        return self.result(made_by, make, keep=self._products % 2 == 1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, what was kept is given back, from the first on."""
        self._again, self._next, self._products = True, 0, 0
        with _Operators(self):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, results are kept."""
        with _Operators(self):
            yield
        if self.saved is not None:  # only now: until here something could be changed in place
            for result in self._results:
                result.value = tree_map(self._pack, result.value)
            self._by_storage.clear()

    def _pack(self, value: Any) -> Any:
        assert self.saved is not None
        return self.saved.pack(value) if isinstance(value, Tensor) else value


_active: ContextVar[Kept | None] = ContextVar("kept results", default=None)


def kept() -> Kept | None:
    """Of the block that is run by operator now, for functions whose result is to be kept whole."""
    return _active.get()


def _selective(saved: Saved | None) -> tuple[Any, Any]:
    """torch's two contexts of a checkpoint: of the forward pass, and of when it is run again."""
    results = Kept(saved)
    return results.writing(), results.reading()


class _Operators(TorchDispatchMode):
    """Shows a block's operators to what keeps their results."""

    def __init__(self, results: Kept):
        super().__init__()
        self._results = results

    def __enter__(self) -> "_Operators":
        self._token = _active.set(self._results)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return self._results.product(func, lambda: func(*args, **kwargs))
        if func._schema.name.startswith(_ATTENTION) and not _draws(func, args, kwargs):
            return self._results.result(func, lambda: func(*args, **kwargs), keep=True)
        if func._schema.is_mutable:
            self._results.forget(list(_written(func, args, kwargs)))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator changes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield given.get(argument.name)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention kernel drops out: not run again, it would leave the generator behind for what follows."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(given.get("dropout_p", 0.0))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
