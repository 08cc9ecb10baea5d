"""The teacher of a distillation: a trained model that is only run forward, and what a student's loss asks of it.

It is no part of the module that a backend trains: it has no gradient, is in no checkpoint and keeps its own names. A
backend holds it beside, whole or sharded, as it holds its other weights. Its last hidden states of a micro-batch are
kept (tokens x hidden); scores are made from them in the head's chunks, so neither model's exist whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.model.deferred import Weights
from shardlab.model.divergence import Divergence
from shardlab.model.matching import Matching, matching, outputs
from shardlab.model.segments import dissect, output_embeddings, output_transform
from shardlab.recipe import DistillSection


class Teacher(nn.Module):
    """A Hugging Face decoder, frozen. `blocks`, `head` and `embedding` are its units of sharding; the rest is its root.

    `forward(batch)` returns the last hidden states, (tokens, hidden size), the final norm applied.
    """

    def __init__(self, model: nn.Module):
        """Takes `model` apart in place; raises UserError if it is no decoder with a linear head."""
        super().__init__()
        anatomy = dissect(model)
        by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
        self.architecture = type(model).__name__
        self.separates_documents = anatomy.separates_documents
        self.body = getattr(model, anatomy.body)
        head = output_embeddings(model)
        assert isinstance(head, nn.Linear)
        self.head = head
        self.multiplier, self.softcap = output_transform(model.config)
        blocks = model.get_submodule(anatomy.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks: list[nn.Module] = list(blocks)
        self.tied = any(parameter is head.weight for parameter in self.body.parameters())
        self.canonical = {name: by_identity[id(parameter)] for name, parameter in self.named_parameters()}
        self.requires_grad_(False)
        self.eval()

    @property
    def embedding(self) -> nn.Module | None:
        """The input embedding, unless it is the head too."""
        found: nn.Module = self.body.get_input_embeddings()
        return None if self.tied else found

    @property
    def units(self) -> list[nn.Module]:
        """What is sharded as one, innermost first; the last one is the teacher itself."""
        apart = [] if self.tied else [self.head, *([self.embedding] if self.embedding is not None else [])]
        return [*self.blocks, *apart, self]

    def named_canonical(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the teacher's files, parameter) for each parameter, tied ones once."""
        for name, parameter in self.named_parameters():
            yield self.canonical[name], parameter

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """See the class; `batch` as in training."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
        hidden: Tensor = self.body(**inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)

    def scores(self, hidden: Tensor) -> Tensor:
        """(tokens, vocabulary) in fp32 for some of `forward`'s rows; the head's weights must be whole."""
        logits = nn.functional.linear(hidden, self.head.weight, self.head.bias).float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Distillation:
    """What a student's forward pass asks of its teacher.

    `columns`: entries of the vocabulary that are compared, from the first. A backend that shards the teacher sets `run`
    (its way to call the teacher) and `whole` (a context in which the head's weights are whole).
    """

    def __init__(self, teacher: Teacher, measure: Divergence, weight: float, columns: int):
        self.teacher = teacher
        self.measure = measure
        self.weight = weight
        self.columns = columns
        self.rows = (columns, columns)  # of the teacher's head and of the student's
        self.matching: tuple[Matching, Weights] | None = None  # of hidden states, for the student to take in
        self.run: Callable[[Mapping[str, Tensor]], Tensor] = teacher
        self.whole: Callable[[], AbstractContextManager[object]] = nullcontext

    def describe(self, kept: int | None = None) -> str:
        """For people: what is compared with what; `kept`: tokens of each position that a cache holds."""
        parameters = sum(parameter.numel() for parameter in self.teacher.parameters())
        mixture = "" if self.measure.name in ("forward_kl", "reverse_kl") else f", mixture {self.measure.mixture:g}"
        text = (
            f"teacher of {parameters / 1e6:.2f}M parameters: {self.weight:g} x {self.measure.name} at temperature "
            f"{self.measure.temperature:g}{mixture} + {1 - self.weight:g} x cross-entropy"
        )
        text += f" {self.matching[0].describe()}" if self.matching is not None else ""
        text += f"; from its {kept} likeliest tokens and the share of the rest" if kept is not None else ""
        teacher, student = self.rows
        if teacher == student:
            return text
        return (
            f"{text}\nthe teacher's head has {teacher} rows, the student's {student}: compared on the tokenizer's "
            f"{self.columns}"
        )

    def look(self, batch: Mapping[str, Tensor]) -> "Taught":
        """The teacher's view of a micro-batch."""
        pairs = () if self.matching is None else self.matching[0].pairs
        with torch.no_grad(), outputs(self.teacher.blocks, (number for _, number in pairs)) as states:
            return Taught(self, self.run(batch), states)


@dataclass(frozen=True)
class Taught:
    """`SoftTargets` of one micro-batch; `hidden` is (tokens, the teacher's hidden size).

    `states`: what the blocks that are matched returned, by number, (batch, sequence, hidden size).
    """

    source: Distillation
    hidden: Tensor
    states: Mapping[int, Tensor]

    @property
    def weight(self) -> float:
        """See `SoftTargets`."""
        return self.source.weight

    def divergence(self, rows: slice, scores: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        """See `SoftTargets`."""
        columns = self.source.columns
        teacher = self.source.teacher.scores(self.hidden[rows])[:, :columns]
        return self.source.measure(scores[:, :columns], teacher, differentiate=differentiate)


def distillation(section: DistillSection, model: nn.Module, student: nn.Module, vocabulary: int) -> Distillation:
    """`model` as the teacher of `student`, for a tokenizer of `vocabulary` entries.

    Heads of one size are compared whole. Of others, which were padded, the tokenizer's entries alone are, as if there
    were no more. Raises UserError for a teacher that lacks some of them, and for models without a linear head.
    """
    head = output_embeddings(student)
    if not isinstance(head, nn.Linear):
        raise UserError(f"distill: {type(student).__name__} has no linear head over a vocabulary to compare by")
    teacher = Teacher(model)
    rows, student_rows = teacher.head.out_features, head.out_features
    if rows < vocabulary:
        raise UserError(
            f"distill.teacher: {section.teacher} has scores for {rows} tokens, the tokenizer has {vocabulary}: it is "
            "not the one that the teacher was trained with"
        )
    measure = Divergence(section.loss, section.temperature, section.mixed)
    found = Distillation(teacher, measure, section.weight, rows if rows == student_rows else vocabulary)
    found.rows = (rows, student_rows)
    if section.hidden is not None:
        blocks = len(student.get_submodule(dissect(student).blocks)), len(teacher.blocks)  # type: ignore[arg-type]
        widths = student.config.hidden_size, model.config.hidden_size  # type: ignore[union-attr]
        found.matching = matching(section.hidden, blocks, widths)  # type: ignore[arg-type]
    return found
