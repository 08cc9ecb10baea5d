"""A distillation on a given backend, and the module that holds student and teacher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab.backends import zero_config
from shardlab.backends.base import Backend
from shardlab.data.window import TAUGHT_IDS, TAUGHT_REST, TAUGHT_SHARES, MicroBatch, Window
from shardlab.model.cached_teacher import CachedTeacher, likeliest
from shardlab.model.deferred import build_deferred
from shardlab.model.divergence import Divergence
from shardlab.model.matching import WithProjections
from shardlab.model.teacher import distillation
from shardlab.model.trainable import Trainable
from shardlab.recipe import DistillSection
from shardlab.topology import Topology
from tests.distributed.batches import DATA, sequences, window
from tests.distributed.jobs import Arrays, Case, make_plan, prepared, settings, whole
from tests.distributed.models import MODELS, VOCABULARY
from tests.model.test_divergence import defined as divergence_of
from tests.train.support import TINY

HIDDEN_WEIGHT = 0.3
PAIRS = ((1, 2), (2, 3))  # blocks of the student and of the teacher, two and three, evenly spaced


@dataclass(frozen=True)
class Lesson:
    """A case, and what the student learns by."""

    case: Case
    loss: str = "forward_kl"
    temperature: float = 2.0
    weight: float = 0.7
    tied: bool = False
    rows: int = VOCABULARY  # of the teacher's head
    hidden: str | None = None  # how the distance of hidden states is taken, if they are matched
    kept: int | None = None  # tokens of each position, of what the teacher said before; None: it is there itself


def teacher(*, tied: bool, rows: int) -> nn.Module:
    """Of other sizes than the student, and larger weights: its distributions are far from flat."""
    sizes = {**TINY, "vocab_size": rows, "hidden_size": 24, "intermediate_size": 7, "num_hidden_layers": 3}
    config = LlamaConfig(
        **{**sizes, "num_key_value_heads": 1},
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attention_dropout=0.5,  # never in force: a teacher is evaluated
    )
    return LlamaForCausalLM(config)


def section(lesson: Lesson) -> DistillSection:
    """The recipe's section of the lesson."""
    given = {"teacher": "t", "loss": lesson.loss, "temperature": lesson.temperature, "weight": lesson.weight}
    hidden = None if lesson.hidden is None else {"loss": lesson.hidden, "weight": HIDDEN_WEIGHT}
    return DistillSection.model_validate({**given, "hidden": hidden})


@contextmanager
def taught(lesson: Lesson) -> Iterator[tuple[Backend, Trainable, Topology]]:
    """The student on its backend, the teacher beside it."""
    case = lesson.case
    model, weights = build_deferred(lambda: MODELS[case.model](case.dropout), seed=0)
    tutor, values = build_deferred(lambda: teacher(tied=lesson.tied, rows=lesson.rows), seed=1)
    found, matching = distillation(section(lesson), tutor, model, VOCABULARY), None
    if found.matching is not None:
        matching, weights = found.matching[0], WithProjections(weights, found.matching[1])
    plan = make_plan(case, sequences(case.data))
    with prepared(model, weights, plan, settings(case), case.threshold, matching) as (engine, trainable, topology):
        if lesson.kept is not None:
            trainable.distillation = CachedTeacher(found, lesson.kept)
            yield engine, trainable, topology
            return
        trainable.distillation = found
        with mock.patch.object(zero_config, "PERSISTENCE_THRESHOLD", case.threshold):
            engine.hold_teacher(trainable.distillation, values)
        yield engine, trainable, topology


def spoken_of(lesson: Lesson, mine: Window) -> Window:
    """The window, with what a cache of the teacher brings for it."""
    if lesson.kept is None:
        return mine
    tutor = real(lambda: teacher(tied=lesson.tied, rows=lesson.rows), seed=1).eval()
    batches = []
    for batch in mine.micro_batches:
        inputs = {name: value for name, value in batch.tensors.items() if name != "targets"}
        with torch.no_grad():
            scores = tutor(**inputs, use_cache=False).logits[..., :VOCABULARY]
        ids, shares, rest = likeliest(scores.flatten(0, 1), lesson.kept, lesson.temperature)
        shape = (*scores.shape[:2], -1)
        said = {
            TAUGHT_IDS: ids.int().view(shape),
            TAUGHT_SHARES: shares.half().view(torch.int16).view(shape),
            TAUGHT_REST: rest.view(torch.int32).view(scores.shape[:2]),
        }
        batches.append(MicroBatch({**batch.tensors, **said}, batch.index))
    return Window(mine.step, tuple(batches), mine.tokens)


def real(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module whole in this process, by the values that a backend gives it."""
    module, source = build_deferred(make, seed=seed)
    for name, _ in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(source.tensor(name)))
    module.tie_weights()  # type: ignore[operator]
    return module


@dataclass
class Learned:
    """What came of it on one rank. Whole tensors are rank 0's."""

    losses: list[float]
    norms: list[float]
    evaluation: tuple[float, int]
    teacher_elements: int  # in this rank's memory, between steps
    fragments: set[str]
    after: Arrays


def learn(lesson: Lesson) -> Learned:
    """Run it on this rank."""
    case = lesson.case
    with taught(lesson) as (engine, trainable, topology):
        applied = []
        for step in range(case.steps):
            mine = spoken_of(lesson, window(case.data, step, case.micro, topology.rank, topology.world_size))
            applied.append(engine.run_window(mine, case.lr))
            if step == 0:
                engine.evaluate(mine.micro_batches)
        batches = window(case.data, 99, case.micro, topology.rank, topology.world_size).micro_batches
        assert trainable.distillation is not None
        there = trainable.distillation.teacher
        held = [] if there is None else there.named_canonical()
        return Learned(
            losses=[one.loss_sum / one.tokens for one in applied],
            norms=[one.grad_norm for one in applied],
            evaluation=engine.evaluate(batches),
            teacher_elements=sum(_local(parameter) for _, parameter in held),
            fragments={fragment.name for fragment in engine.fragments()},
            after=whole(engine),
        )


def in_shares(temperature: float, kept: int, student: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """Log shares of the teacher's `kept` likeliest tokens and of the rest: the student's, and the teacher's."""
    q, p = (torch.softmax(scores / temperature, 1) for scores in (student, said))
    ids = p.topk(kept, dim=1).indices
    both = (torch.cat([one.gather(1, ids), 1 - one.gather(1, ids).sum(1, keepdim=True)], 1) for one in (q, p))
    first, second = (one.log() for one in both)
    return first, second


def _local(parameter: torch.Tensor) -> int:
    to_local = getattr(parameter, "to_local", None)
    partition = getattr(parameter, "ds_tensor", None)  # DeepSpeed's
    if partition is not None and parameter.numel() == 0:
        return int(partition.numel())
    return int(to_local().numel() if to_local is not None else parameter.numel())


def ran(model: nn.Module, one: dict[str, Tensor], valid: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Scores of the tokens that count, and what each block returned of them, before any norm."""
    states: list[Tensor] = []
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h  # type: ignore[union-attr]

    def note(_block: nn.Module, _given: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0][valid])

    hooks = [block.register_forward_hook(note) for block in blocks]  # type: ignore[union-attr]
    scores = model(**one, use_cache=False).logits[0][valid]
    for hook in hooks:
        hook.remove()
    return scores, states


def distances(lesson: Lesson, one: Tensor, other: Tensor) -> Tensor:
    """Of each token, by the definition."""
    if lesson.hidden == "cosine":
        return 1 - (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))
    return ((one - other) ** 2).sum(1) / other.shape[1]


def projections(lesson: Lesson, student: nn.Module, tutor: nn.Module) -> list[nn.Parameter]:
    """The maps between the two widths, by their initial values."""
    if lesson.hidden is None:
        return []
    matching = distillation(section(lesson), tutor, student, VOCABULARY).matching
    assert matching is not None
    return [nn.Parameter(matching[1].tensor(f"projections.{number}.weight")) for number in range(len(PAIRS))]


def defined(lesson: Lesson) -> list[float]:
    """Losses by plain torch in one process: both models whole, one row of the batch after another, SGD by hand."""
    case = lesson.case
    model = real(lambda: MODELS[case.model](case.dropout), seed=0)
    tutor = real(lambda: teacher(tied=lesson.tied, rows=lesson.rows), seed=1).eval()
    maps = projections(lesson, model, tutor)
    optimizer = torch.optim.SGD([*model.parameters(), *maps], lr=case.lr)
    measure, losses = Divergence(lesson.loss, lesson.temperature, section(lesson).mixed), []  # type: ignore[arg-type]
    for step in range(case.steps):
        batch = DATA[case.data](step)
        counted, total = int((batch["targets"] >= 0).sum()), 0.0
        for row in range(len(batch["targets"])):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            targets = one.pop("targets").flatten()
            valid = targets >= 0
            if not valid.any():
                continue
            scores, states = ran(model, one, valid)
            with torch.no_grad():
                said, shown = ran(tutor, one, valid)
            said = said[:, :VOCABULARY]
            hard = nn.functional.cross_entropy(scores, targets[valid], reduction="sum")
            if lesson.kept is not None:
                scores_, said = in_shares(measure.temperature, lesson.kept, scores, said)
                soft = divergence_of(replace(measure, temperature=1.0), scores_, said) * measure.temperature**2
            else:
                soft = divergence_of(measure, scores, said)
            loss = (1 - lesson.weight) * hard + lesson.weight * soft.sum()
            for number, (mine, other) in enumerate(PAIRS if lesson.hidden else ()):
                away = distances(lesson, states[mine - 1] @ maps[number].t(), shown[other - 1])
                loss = loss + HIDDEN_WEIGHT / len(PAIRS) * away.sum()
            (loss / counted).backward()
            total += loss.item() / counted
        losses.append(total)
        nn.utils.clip_grad_norm_([*model.parameters(), *maps], case.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    return losses
