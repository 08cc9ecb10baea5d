"""The ways to train one model on given machines: each with its predicted peak and time, and which that fits is best.

Where nothing is known of the machine's speed the choice follows a rule that is printed with it: what recomputes or
moves less comes first. `RULE` says it in words, `_rank` in code. The same order decides among plans of about the same
time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardlab.data.tokenizer import nominal_vocabulary
from shardlab.data.window import TAUGHT_IDS, TAUGHT_REST, TAUGHT_SHARES
from shardlab.errors import UserError
from shardlab.model.build import build_shell, teacher_shell
from shardlab.model.cached_teacher import CachedTeacher
from shardlab.model.qat import round_layers
from shardlab.model.trainable import Trainable, make_trainable
from shardlab.plan import BackendName, Footprint, Loop, ModelShape, Offload, Plan, Recompute
from shardlab.planner.around import Saving
from shardlab.planner.compiled import uncompilable
from shardlab.planner.cost import Cost
from shardlab.planner.fewest import fewest_recomputed
from shardlab.planner.machine import Machine
from shardlab.planner.plain import PlainLoop, plain_batch
from shardlab.planner.predict import Predictor
from shardlab.planner.streaming import fitted
from shardlab.recipe import Recipe
from shardlab.state.masks import kept_masks

_ORDER = (
    "least recomputed, then least offloaded, then the backend that communicates least "
    "(ddp, zero1, zero2, fsdp, zero3), then the largest micro-batch"
)
RULE = f"{_ORDER}; nothing is known of this hardware's speed"
SAME_TIME = 1.01  # predictions nearer than this are no reason to choose
TIME_RULE = f"the fastest by prediction; within {SAME_TIME - 1:.0%} of it, {_ORDER}"
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # by what they run again
ELSEWHERE: tuple[Recompute, ...] = ("none", "full")  # what accelerate and the HF Trainer have
BACKENDS: tuple[BackendName, ...] = ("ddp", "zero1", "zero2", "fsdp", "zero3")  # by what they send


@dataclass(frozen=True)
class Candidate:
    """A plan and what it takes. `left_bytes`: memory of a rank that stays free at the interval's upper end.

    `cost` is None where nothing is known of the machine's speed.
    """

    plan: Plan
    footprint: Footprint
    left_bytes: int
    cost: Cost | None = None

    @property
    def fits(self) -> bool:
        """Also at the upper end of the interval."""
        return self.left_bytes >= 0


@dataclass(frozen=True)
class Survey:
    """All candidates, the recipe's own first if there is one; and the best that fits."""

    machine: Machine
    recipe: Recipe
    shape: ModelShape
    block_class: str
    own: Candidate | None
    candidates: tuple[Candidate, ...]
    loop: Loop = "shardlab"
    stream: Candidate | None = None  # of one rank without an accelerator: state in files

    @property
    def parameters(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def trainable(self) -> int:
        """Elements that have a gradient."""
        return self.shape.numel(trainable=True)

    @property
    def fitting(self) -> list[Candidate]:
        """Those that fit, the best first: by `TIME_RULE` where their time is predicted, else by `RULE`."""
        found = sorted((c for c in self.candidates if c.fits), key=_rank)
        if not self.timed or not found:
            return found
        found.sort(key=_seconds)
        fast = [c for c in found if _seconds(c) <= SAME_TIME * _seconds(found[0])]
        return [*sorted(fast, key=_rank), *found[len(fast) :]]

    @property
    def best(self) -> Candidate | None:
        """The first of them."""
        return next(iter(self.fitting), None)

    @property
    def timed(self) -> bool:
        """Whether time is predicted."""
        return all(candidate.cost is not None for candidate in self.candidates)  # stream is none of them

    @property
    def front(self) -> list[Candidate]:
        """Those that fit, and that no other beats both in memory and in time; the fastest first."""
        if not self.timed:
            return []
        chosen: list[Candidate] = []
        for candidate in sorted((c for c in self.candidates if c.fits), key=lambda c: (_seconds(c), -c.left_bytes)):
            if not chosen or candidate.left_bytes > chosen[-1].left_bytes:
                chosen.append(candidate)
        return chosen

    @property
    def rule(self) -> str:
        """By which the best was chosen."""
        return TIME_RULE if self.timed else RULE


def _seconds(candidate: Candidate) -> float:
    return candidate.cost.seconds if candidate.cost is not None else float("inf")


def predictor(recipe: Recipe, machine: Machine, vocabulary: int | None = None, loop: Loop = "shardlab") -> Predictor:
    """Footprints of this recipe's model, batch and optimizer, in our loop or in a plain one.

    `vocabulary` is the tokenizer's, where it is known better than by its name. Raises UserError for a model that can't
    be planned.
    """
    data = recipe.data
    if data.builder is not None:
        raise UserError("data.builder: a plan needs rows of known length; it is for language models so far")
    vocabulary = nominal_vocabulary(data.tokenizer) if vocabulary is None else vocabulary

    module = _module(recipe, vocabulary, loop)
    taught = module.distillation

    def batch(micro_batch: int) -> dict[str, Tensor]:
        if loop != "shardlab":
            return plain_batch(micro_batch, data.sequence_length)
        rows = row_shapes(micro_batch, data.sequence_length, packed=data.packing)
        return {**rows, **taught_shapes(rows["input_ids"], taught.top_k)} if isinstance(taught, CachedTeacher) else rows

    ours = loop == "shardlab"
    return Predictor(
        module,
        batch,
        recipe.train.optimizer,
        accelerator=machine.accelerator,
        loop=loop,
        saving=Saving.of(recipe) if ours else None,
        masked=kept_masks(recipe.model).nbytes if ours else 0,
    )


def _module(recipe: Recipe, vocabulary: int, loop: Loop) -> Trainable:
    """What is traced; no weights are read."""
    section, length = recipe.distill, recipe.data.sequence_length
    shell = build_shell(recipe.model, vocabulary=vocabulary, sequence_length=length)
    if recipe.train.qat is not None:
        if loop != "shardlab":
            raise UserError("train.qat is of our own loop; no plain one is planned with it")
        round_layers(shell, recipe.train.qat)
    if section is None:
        return make_trainable(shell) if loop == "shardlab" else PlainLoop(shell)
    if loop != "shardlab":
        raise UserError("distill is of our own loop; no plain one is planned with a teacher")
    teacher = teacher_shell(section, shell, vocabulary=vocabulary, sequence_length=length)
    module = make_trainable(shell)
    if teacher.matching is not None:
        module.take_in(teacher.matching[0])
    module.distillation = teacher if section.cache is None else CachedTeacher(teacher, section.cache_top_k)
    return module


def row_shapes(micro_batch: int, sequence_length: int, *, packed: bool) -> dict[str, Tensor]:
    """A micro-batch as training makes it; packed rows hold several documents, and so need a mask."""
    positions = torch.arange(sequence_length).repeat(micro_batch, 1)
    if packed and sequence_length > 1:
        positions[:, sequence_length // 2 :] -= sequence_length // 2
    tokens = torch.zeros(micro_batch, sequence_length, dtype=torch.long)
    return {"input_ids": tokens, "targets": tokens, "position_ids": positions}


def taught_shapes(tokens: Tensor, kept: int) -> dict[str, Tensor]:
    """What a teacher's cache adds to it, of `kept` tokens each."""
    ids = tokens.new_zeros(*tokens.shape, kept)
    return {TAUGHT_IDS: ids.int(), TAUGHT_SHARES: ids.short(), TAUGHT_REST: tokens.int()}


def assess(plan: Plan, predictor: Predictor, machine: Machine) -> Candidate:
    """The plan's footprint against the machine's memory, and its time."""
    footprint = predictor.footprint(plan)
    left = machine.memory_bytes - footprint.highest - footprint.libraries
    if machine.accelerator:
        left = min(left, machine.host_bytes - footprint.on_host - footprint.host_libraries)
    return Candidate(plan, footprint, left, predictor.cost(plan, machine))


def survey(
    recipe: Recipe,
    machine: Machine,
    own: Plan | None = None,
    predict: Predictor | None = None,
    loop: Loop = "shardlab",
    keep: Callable[[Plan], bool] = lambda plan: True,
) -> Survey:
    """Every candidate for `recipe` on `machine` up to the first that does not fit, and the recipe's own plan.

    `predict`, where there is one for this recipe and kind of machine already, saves building the model again; `keep`
    says which plans are looked at.
    """
    predict = predict or predictor(recipe, machine, loop=loop)
    base = own if own is not None else _base(recipe, machine.ranks)
    found: list[Candidate] = []
    full: set[tuple[str, Offload, str]] = set()
    for plan in filter(keep, candidates(base, machine, loop)):
        kind = (plan.backend, plan.offload, plan.recompute)
        if kind not in full:  # with more sequences at once it would fit still less
            found.append(assess(plan, predict, machine))
            if not found[-1].fits:
                full.add(kind)
    if loop == "shardlab":
        between = filter(keep, _between(found, machine))
        found += [one for plan in between for one in _paying(plan, found, predict, machine)]
    return Survey(
        machine,
        recipe,
        predict.shape,
        predict.block_class,
        assess(laid_out(own, predict, machine), predict, machine) if own is not None else None,
        tuple(found),
        loop,
        _stream(base, predict, machine) if loop == "shardlab" else None,
    )


def _between(found: Sequence[Candidate], machine: Machine) -> Iterator[Plan]:
    """Where a plan fits with every block run again and not with none: fewer of them, or what they save on the disk.

    The disk only where its speed is known, for it may be far too slow.
    """
    fitting = [candidate.plan for candidate in found if candidate.fits]
    for plan in fitting:
        if plan.recompute == "full" and replace(plan, recompute="none") not in fitting:
            yield replace(plan, recompute_fits=True)
            if machine.rates is not None and machine.rates.disk is not None and not plan.compile:
                yield replace(plan, recompute="none", offload=replace(plan.offload, activations="disk"))


def _paying(plan: Plan, found: Sequence[Candidate], predict: Predictor, machine: Machine) -> Iterator[Candidate]:
    """`plan`, of those that `_between` gives, where it fits and is quicker than what it stands for."""
    one = assess(laid_out(plan, predict, machine), predict, machine)
    whole = replace(plan, recompute="full", recompute_fits=False, offload=replace(plan.offload, activations="none"))
    other = next(candidate for candidate in found if candidate.plan == whole)
    known = one.cost is not None and other.cost is not None
    quicker = _seconds(one) < _seconds(other) if known else one.plan.recompute_blocks != predict.shape.blocks
    if one.fits and quicker:
        yield one


def laid_out(plan: Plan, predict: Predictor, machine: Machine) -> Plan:
    """With what is found only by the machine's memory: a stream's layout, the number of blocks that are run again."""
    if plan.backend == "stream" and not machine.accelerator:
        return fitted(plan, predict, machine)
    if plan.recompute_fits:
        with suppress(UserError):  # where nothing fits, its figures are those of all blocks run again
            return fewest_recomputed(plan, predict, machine)
    return plan


def _stream(base: Plan, predict: Predictor, machine: Machine) -> Candidate | None:
    """Backend stream at the recipe's own limit, or with all of the machine's memory; None where it can't run at all."""
    if base.world_size > 1 or machine.accelerator:
        return None
    plan = replace(_free(base), backend="stream", recompute="full", replicas=1, compile=False, keep_freed=False)
    try:
        found = assess(fitted(plan, predict, machine), predict, machine)
        if found.cost is None:
            return found
        spilling = replace(plan, offload=Offload(activations="disk"))
        other = assess(fitted(spilling, predict, machine), predict, machine)
    except UserError:  # not even its smallest layout fits, or a model that has no blocks
        return None
    return min(found, other, key=_seconds)


def _base(recipe: Recipe, ranks: int) -> Plan:
    train = recipe.train
    share = max(1, train.global_batch_size // ranks)
    clip, seed = train.clip_grad_norm, train.seed
    kept, compiled = recipe.shard.keep_freed, train.compile
    return Plan(
        "ddp",
        ranks,
        1,
        share,
        share * ranks,
        train.precision,
        keep_freed=kept,
        clip_grad_norm=clip,
        compile=compiled,
        seed=seed,
    )


def candidates(base: Plan, machine: Machine, loop: Loop = "shardlab") -> Iterator[Plan]:
    """Plans that differ from `base` in backend, offload, recompute and micro-batch."""
    share, base = base.accumulation * base.micro_batch, _free(base)
    sizes = [size for size in sorted({*MICRO_BATCHES, base.micro_batch}) if share % size == 0]
    for backend in BACKENDS if base.world_size > 1 or machine.accelerator else BACKENDS[:1]:
        if backend == "fsdp" and loop != "shardlab" and not machine.accelerator:
            continue  # on a CPU Accelerate turns it into DDP
        for offload in _offloads(backend, machine):
            for recompute in RECOMPUTE if loop == "shardlab" else ELSEWHERE:
                if base.keep_freed and backend != "ddp":
                    continue
                if base.compile and uncompilable(backend, recompute, offload.activations):
                    continue
                for size in sizes:
                    yield replace(
                        base,
                        backend=backend,
                        offload=offload,
                        recompute=recompute,
                        micro_batch=size,
                        accumulation=share // size,
                        replicas=1,
                    )


def _free(plan: Plan) -> Plan:
    """Without what was chosen for it alone."""
    return replace(plan, offload=Offload(), recompute_blocks=None, recompute_fits=False, memory_limit=None, reasons=())


def _offloads(backend: BackendName, machine: Machine) -> Iterator[Offload]:
    """On a CPU there is nowhere else to put anything."""
    yield Offload()
    if machine.accelerator and backend in ("zero1", "zero2"):
        yield Offload(optimizer="cpu")
    if machine.accelerator and backend in ("zero3", "fsdp"):
        yield Offload("cpu", "cpu")


def _rank(candidate: Candidate) -> tuple[float, int, int, int]:
    plan = candidate.plan
    offload = plan.offload
    offloaded = sum(where != "none" for where in (offload.parameters, offload.optimizer, offload.activations))
    again = RECOMPUTE.index(plan.recompute) - (0.5 if plan.recompute_blocks is not None else 0.0)
    return again, offloaded, BACKENDS.index(plan.backend), -plan.micro_batch


def nearest(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that do not fit, the one that misses by the least."""
    return max(candidates, key=lambda candidate: candidate.left_bytes)
