"""What a backend trains: a module that maps a micro-batch to its share of the step's loss.

`CausalLM` wraps a Hugging Face decoder (its own forward up to the last block, then `HeadLoss`); `Summed` wraps any
other module that brings its own summed loss and count. Both seed each segment's random numbers and recompute by
policy.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.data.window import IGNORED, TAUGHT
from shardlab.errors import UserError
from shardlab.model import attention, policies
from shardlab.model.cached_teacher import CachedTeacher
from shardlab.model.head import HeadLoss
from shardlab.model.matching import PREFIX, Matching, outputs
from shardlab.model.randomness import StepRandom
from shardlab.model.saved import Saved, Shelves
from shardlab.model.segments import Anatomy, Capture, capture, dissect, output_embeddings, output_transform
from shardlab.model.teacher import Distillation, Taught, Teacher
from shardlab.plan import Recompute

_NO_INPUTS = frozenset({"targets", *TAUGHT})


class Trainable(nn.Module):
    """The module that backends shard and run.

    `forward(batch, denominator)` returns (sum of losses / denominator), a scalar; its gradient, summed over
    micro-batches and ranks, is the step's gradient. `blocks` are the units of sharding and recompute, `tail` the last
    unit, if any.
    """

    blocks: list[nn.Module]
    tail: HeadLoss | None
    tied = False  # whether the head's weight is used in the body too
    random: StepRandom
    matching: Matching | None  # of a teacher's hidden states
    canonical: dict[str, str]  # this module's parameter names -> the names in the user's model; tied ones once
    aliases: dict[str, str]  # other names of tied tensors in the user's model -> the canonical one
    shapes: dict[str, torch.Size]  # by the user's names, before anything was sharded
    kept_buffers: dict[str, str]  # this module's names of buffers that are saved with the model -> the user's
    architecture: str  # class name of the user's model
    generation_config: Any = None  # a Hugging Face model's own
    separates_documents = True  # whether documents in one row, by position_ids, do not see each other
    distillation: Distillation | CachedTeacher | None = (
        None  # in training a teacher is asked too; no submodule: see model/teacher.py
    )

    @property
    def last(self) -> nn.Module | None:
        """The module that the last segment begins with: `tail`, or a head that stands alone."""
        return self.tail

    @property
    def embedding(self) -> nn.Module | None:
        """The input embedding, where it is no part of another unit.

        A property: as an attribute it would be registered as one more child, and its parameters found under two names.
        """
        return None

    @property
    def table(self) -> nn.Module | None:
        """The input embedding of a language model, tied or not; a property for the same reason."""
        return None

    def named_trainables(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(the user's name, parameter) for each parameter that takes a gradient."""
        for name, parameter in self.named_canonical():
            if parameter.requires_grad:
                yield name, parameter

    def named_canonical(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(the user's name, parameter) for each parameter, tied ones once."""
        for name, parameter in self.named_parameters():
            yield self.canonical[name], parameter

    def named_kept_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(the user's name, buffer) for each buffer that belongs into a file, such as a batch norm's statistics."""
        for name, buffer in self.named_buffers():
            if name in self.kept_buffers:
                yield self.kept_buffers[name], buffer

    def check_tie(self) -> None:
        """Raises RuntimeError where wrapping has made two tensors of a tied head and embedding."""
        if self.tied and self.tail is not None:
            head = self.tail.head.weight
            if not any(parameter is head for name, parameter in self.named_parameters() if "tail." not in name):
                raise RuntimeError("sharding has untied the head from the embedding: they would drift apart")

    def set_recompute(self, recompute: Recompute, count: int | None = None) -> None:
        """Another policy for the steps to come: of the first `count` blocks, or of all. The others keep everything."""
        for number, block in enumerate(self.blocks):
            assert isinstance(block.forward, _BlockForward)
            block.forward.recompute = recompute if count is None or number < count else "none"

    def compile_blocks(self) -> None:
        """Run each block as torch.compile makes it, in training. The first step is when that happens."""
        attention.leave_uncompiled()
        for block in self.blocks:
            assert isinstance(block.forward, _BlockForward)
            block.forward.compile()

    def set_shelves(self, shelves: Shelves | None, start: int = 0) -> None:
        """Where the blocks from number `start` on keep what they save for the backward pass; None: where it is made."""
        for number, block in enumerate(self.blocks):
            assert isinstance(block.forward, _BlockForward)
            block.forward.shelves = shelves if number >= start else None

    def take_in(self, matching: Matching) -> None:
        """Hidden states are compared by it in training, and its projections learn: before a backend has the module."""
        self.matching = matching
        for name, parameter in matching.named_parameters():
            canonical = PREFIX + name.removeprefix("projections.")
            self.canonical[f"matching.{name}"] = canonical
            self.shapes[canonical] = parameter.shape

    def _finish(self, model: nn.Module, aliases: dict[str, str], seed: int, recompute: Recompute) -> None:
        """The last step of every constructor."""
        self.architecture = type(model).__name__
        self.aliases = aliases
        self.shapes = {name: parameter.shape for name, parameter in self.named_canonical()}
        self.random = StepRandom(seed)
        self.matching = None
        for index, block in enumerate(self.blocks, start=1):
            block.forward = _BlockForward(block, self.random, index, recompute)


class _BlockForward:
    """A block's forward that seeds its random numbers, and drops its activations for recompute where asked.

    The seeding is inside what is recomputed, so the recomputed dropout masks are the same. It stands inside the
    module's own hooks, so a sharding backend's gathers surround it in forward and recompute alike.
    """

    def __init__(self, block: nn.Module, random: StepRandom, index: int, recompute: Recompute):
        self._block = block
        self._forward = block.forward
        self._compiled = block.forward
        self._random = random
        self._index = index
        self.recompute = recompute
        self.shelves: Shelves | None = None

    def compile(self) -> None:
        """From the next call on. Dropout draws its numbers as the block does that is not compiled."""
        self._compiled = torch.compile(self._forward, options={"fallback_random": True})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        saved = None
        if self.shelves is not None and torch.is_grad_enabled():
            saved = Saved(self.shelves.begin(), self._block, (*args[1:], *kwargs.values()))
        return policies.run(self.recompute, self._run, args, kwargs, saved)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._random.enter(self._index)
        forward = self._compiled if torch.is_grad_enabled() else self._forward
        return forward(*args, **kwargs)


class CausalLM(Trainable):
    """A Hugging Face decoder: `body` is its base model with the final norm moved into `tail`."""

    def __init__(self, model: nn.Module, *, seed: int = 0, recompute: Recompute = "none"):
        """Takes `model` apart in place; afterwards it must be used through this wrapper only."""
        super().__init__()
        anatomy = dissect(model)
        aliases = tied_names(model)
        by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
        kept = {id(buffer): name for name, buffer in persistent_buffers(model)}
        multiplier, softcap = output_transform(model.config)
        self.anatomy: Anatomy = anatomy
        self.separates_documents = anatomy.separates_documents
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.body = getattr(model, anatomy.body)
        norms = [model.get_submodule(name) for name in anatomy.tail]
        for name in anatomy.tail:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Identity())
        head = output_embeddings(model)
        assert isinstance(head, nn.Linear)
        self.tail: HeadLoss = HeadLoss(norms, head, multiplier=multiplier, softcap=softcap)
        self.blocks = list(self._block_list())
        self.tied = any(parameter is self.tail.head.weight for parameter in self.body.parameters())
        self.canonical = {name: by_identity[id(parameter)] for name, parameter in self.named_parameters()}
        self.kept_buffers = {name: kept[id(buffer)] for name, buffer in self.named_buffers() if id(buffer) in kept}
        self._finish(model, aliases, seed, recompute)

    @property
    def embedding(self) -> nn.Module | None:
        """See `Trainable.embedding`."""
        return None if self.tied else self.table

    @property
    def table(self) -> nn.Module | None:
        """See `Trainable.table`."""
        found: nn.Module | None = self.body.get_input_embeddings()
        return found

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The last block's output, (batch, sequence, hidden)."""
        self.random.enter(0)
        # No cache: with one, position ids no longer separate packed documents (see docs/decisions.md).
        output: Tensor = self.body(**_inputs(batch), use_cache=False).last_hidden_state
        return output

    def forward(self, batch: Mapping[str, Tensor], denominator: float) -> Tensor:
        """See `Trainable`; `batch` as in `data.window.MicroBatch.tensors`."""
        taught = self.distillation if self.training else None
        soft = None if taught is None else taught.look(batch)
        matched = None
        if self.matching is not None and isinstance(soft, Taught):
            with outputs(self.blocks, (number for number, _ in self.matching.pairs)) as states:
                hidden = self.hidden(batch)
            matched = self.matching(states, soft.states, batch["targets"]) / denominator
        else:
            hidden = self.hidden(batch)
        self.random.enter(len(self.blocks) + 1)
        with nullcontext() if taught is None else taught.whole():
            result: Tensor = self.tail(hidden, batch["targets"], denominator, soft)
        return result if matched is None else result + matched

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Whole logits (batch, sequence, vocabulary): for comparison, never in training."""
        return self.tail.logits(self.hidden(batch))

    def capture(self, batch: Mapping[str, Tensor]) -> Capture:
        """The embedding's output and each block's own arguments for `batch`."""
        return capture(self.body, self._block_list(), self.anatomy.tuple_output, _inputs(batch))

    def _block_list(self) -> nn.ModuleList:
        blocks = self.body.get_submodule(self.anatomy.blocks.removeprefix(f"{self.anatomy.body}."))
        assert isinstance(blocks, nn.ModuleList)
        return blocks


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are known by another name already -> that name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = ((name, first[id(parameter)]) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: canonical for name, canonical in names if name != canonical}


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in _NO_INPUTS}


class Summed(Trainable):
    """Any module whose `forward(batch)` returns (summed loss, count): a classifier, a regression."""

    def __init__(self, model: nn.Module, *, seed: int = 0, recompute: Recompute = "none"):
        super().__init__()
        self.model = model
        self.tail = None
        # Each direct child is a segment: without a list of equal blocks there is no better cut to be known.
        self.blocks = [child for child in model.children() if any(True for _ in child.parameters())]
        self.canonical = {name: name.removeprefix("model.") for name, _ in self.named_parameters()}
        self.kept_buffers = {f"model.{name}": name for name, _ in persistent_buffers(model)}
        self._finish(model, tied_names(model), seed, recompute)

    def forward(self, batch: Mapping[str, Tensor], denominator: float) -> Tensor:
        """See `Trainable`."""
        self.random.enter(0)
        total, _count = self.model(batch)
        return total / denominator


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) for each that is in the model's state_dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def refuse_packing(module: Trainable | Teacher) -> None:
    """Raises UserError where documents in one row would see each other: transformers itself says nothing of it."""
    if not module.separates_documents:
        raise UserError(
            f"{module.architecture} does not keep documents in one row apart (its attention mask ignores "
            "position_ids): give each a row of its own, data.packing=false"
        )


def holds_packed_documents(batch: Mapping[str, Tensor]) -> bool:
    """Whether positions start anew within a row, and a token after that counts: padding at the end does no harm."""
    positions = batch.get("position_ids")
    if positions is None:
        return False
    anew = (positions[:, 1:] != positions[:, :-1] + 1).cumsum(dim=1) > 0
    return bool((anew & (batch["targets"][:, 1:] != IGNORED)).any())


def make_trainable(model: nn.Module, *, seed: int = 0, recompute: Recompute = "none") -> Trainable:
    """Wrap a model for training: `CausalLM` for a Hugging Face decoder, else `Summed`."""
    if hasattr(model, "get_output_embeddings") and hasattr(model, "config"):
        return CausalLM(model, seed=seed, recompute=recompute)
    return Summed(model, seed=seed, recompute=recompute)
