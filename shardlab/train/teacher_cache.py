"""A distillation's cache: opened for a run, and filled by the teacher with the rows that the run lacks.

The teacher goes through memory segment by segment, so it need not fit, and it is gone before the student comes. Each
rank writes its share of the shards; what a killed run has written stays.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardlab.backends.base import move
from shardlab.backends.materialize import move_buffers
from shardlab.checkpoint.ranks import Agreement, Ranks
from shardlab.checkpoint.storage import spelled_bytes
from shardlab.data import MicroBatch, PreparedData, StreamedText
from shardlab.data.prepare import MadeRows
from shardlab.data.teacher_cache import CacheIdentity, Said, TeacherCache, damaged, directory_digest, rows_of_run
from shardlab.errors import ExitCode, UserError
from shardlab.model.build import teacher_alone
from shardlab.model.cached_teacher import likeliest
from shardlab.model.deferred import Weights
from shardlab.model.loaded import Loaded, around_blocks, names_by_identity
from shardlab.model.trainable import CausalLM, refuse_packing
from shardlab.recipe import Recipe
from shardlab.runtime.stopping import REQUEST
from shardlab.topology import Topology

Say = Callable[[str], None]


def open_cache(recipe: Recipe, data: PreparedData, columns: int, ranks: Ranks) -> TeacherCache:
    """The recipe's cache, as it is. Collective. Raises UserError where it is of something else."""
    section = recipe.distill
    assert section is not None
    assert section.cache is not None
    if isinstance(data.train, StreamedText):
        raise UserError(
            "distill.cache: streamed text has no rows to keep scores by: set data.streaming=false or distill.cache=null"
        )
    with Agreement[str](ranks) as agreed:
        agreed.value = directory_digest(Path(section.teacher)) if ranks.rank == 0 else ""
    identity = CacheIdentity(
        teacher=agreed.values[0],
        text=data.fingerprint,
        rows=len(data.train),
        sequence_length=recipe.data.sequence_length,
        packing=recipe.data.packing,
        columns=columns,
        top_k=min(section.cache_top_k, columns),
        temperature=section.temperature,
    )
    with Agreement[None](ranks):
        return TeacherCache(Path(section.cache), identity)


def fill(recipe: Recipe, cache: TeacherCache, data: PreparedData, micro_batch: int, on: "Fillers") -> None:
    """Let the teacher say what the run's rows lack. Collective; afterwards every rank reads all that it needs.

    Raises UserError for a directory that can't be written or that another run writes, and SystemExit with
    `ExitCode.STOPPED` on a signal.
    """
    train, ranks = recipe.train, on.ranks
    wanted = rows_of_run(train.steps * train.global_batch_size, cache.identity.rows, train.seed)
    rotten = _damaged(cache, ranks)
    with ExitStack() as stack:
        with Agreement[NDArray[np.int64]](ranks) as agreed:
            cache.look(rotten)
            missing = cache.missing(wanted)
            if ranks.rank == 0 and len(missing):
                stack.enter_context(cache.writing())
                for file in rotten:
                    on.say(f"{file} is damaged: its rows are written anew")
                    file.unlink()
                cache.look()  # what another run has written meanwhile
                missing = cache.missing(wanted)
            agreed.value = missing
        missing = agreed.values[0]
        if len(missing):
            _write(recipe, cache, data, missing, micro_batch, on)
    with Agreement[None](ranks):
        cache.look()
        left = len(cache.missing(wanted))
        if left:
            raise UserError(
                f"distill.cache: {cache.directory} lacks {left} rows here: it has to be one that all hosts see"
            )


class Fillers:
    """The ranks that write, and how they compute."""

    def __init__(self, ranks: Ranks, topology: Topology, precision: str, say: Say):
        self.ranks = ranks
        self.device = torch.device(topology.device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.say = say


def _damaged(cache: TeacherCache, ranks: Ranks) -> list[Path]:
    """Over all shards, each read by one rank."""
    with Agreement[list[Path]](ranks) as agreed:
        agreed.value = damaged(cache.files()[ranks.rank :: ranks.world_size])
    return [file for found in agreed.values for file in found]


def _write(
    recipe: Recipe, cache: TeacherCache, data: PreparedData, missing: NDArray[np.int64], micro_batch: int, on: Fillers
) -> None:
    section, ranks, identity = recipe.distill, on.ranks, cache.identity
    assert section is not None
    assert not isinstance(data.train, StreamedText)
    size = spelled_bytes(len(missing) * identity.sequence_length * identity.token_bytes)
    on.say(f"the teacher speaks of {len(missing):,} rows of {identity.sequence_length}: {size} in {cache.directory}")
    shards = [missing[start : start + identity.shard_rows] for start in range(0, len(missing), identity.shard_rows)]
    with Agreement[None](ranks):
        model, weights = teacher_alone(section, sequence_length=identity.sequence_length)
        if recipe.data.packing:
            refuse_packing(model)
        speaker = Speaker(model, weights, identity, on.device, on.dtype)
    with speaker.ready():
        for number in range(0, len(shards), ranks.world_size):
            # Rank by rank and round by round: none waits for another for longer than a shard takes.
            with Agreement[None](ranks):
                if number + ranks.rank < len(shards):
                    rows = shards[number + ranks.rank]
                    cache.put(rows, speaker.says(_batches(data.train, rows, micro_batch)))
            done = min(number + ranks.world_size, len(shards))
            on.say(f"the teacher's scores: shard {done} of {len(shards)}")
            if not ranks.all(not REQUEST.came):
                on.say(f"stopped on {REQUEST.name}: the same command goes on from there")
                raise SystemExit(ExitCode.STOPPED)


def _batches(rows: MadeRows, chosen: NDArray[np.int64], size: int) -> list[MicroBatch]:
    return [MicroBatch(rows.batch(chosen[start : start + size]), 0) for start in range(0, len(chosen), size)]


class Speaker:
    """A teacher whose segments are in memory one after another; on an accelerator with room for it they all stay."""

    def __init__(
        self, model: CausalLM, weights: Weights, identity: CacheIdentity, device: torch.device, dtype: torch.dtype
    ):
        self._model = model.eval()
        self._identity = identity
        self._device = device
        self._names = names_by_identity(model)
        self._weights, self._dtype = weights, dtype
        move_buffers(model, device)
        self._stays = device.type != "cpu" and self._has_room()

    def _has_room(self) -> bool:
        size = sum(shape.numel() for shape in self._model.shapes.values()) * self._dtype.itemsize
        free, _ = torch.accelerator.get_memory_info(self._device)
        return 2 * size <= free

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Around all that is said."""
        with ExitStack() as stack:
            if self._stays:
                for module in [around_blocks(self._model), *self._model.blocks, self._model.tail]:
                    stack.enter_context(Loaded(module, self._names, self._weights, self._device, self._dtype))
            yield

    @contextmanager
    def _loaded(self, module: nn.Module) -> Iterator[None]:
        if self._stays:
            yield
            return
        with Loaded(module, self._names, self._weights, self._device, self._dtype):
            yield

    @torch.no_grad()
    def says(self, batches: Sequence[MicroBatch]) -> Said:
        """What a cache keeps of these rows."""
        model, identity, tail = self._model, self._identity, self._model.tail
        with self._loaded(around_blocks(model)):
            captures = [model.capture(move(batch, self._device)) for batch in batches]
        hidden = [capture.hidden for capture in captures]
        for number, block in enumerate(model.blocks):
            with self._loaded(block):
                hidden = [c.run_block(number, block, one) for c, one in zip(captures, hidden, strict=True)]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        with self._loaded(tail):
            for one in hidden:
                for norm in tail.norms:
                    one = norm(one)
                for chunk in one.flatten(0, 1).split(tail.chunk_tokens):
                    scores = tail.transform(tail.head(chunk).float())[:, : identity.columns]
                    ids, shares, rest = likeliest(scores, identity.top_k, identity.temperature)
                    parts.append((ids.int().cpu(), shares.half().cpu(), rest.cpu()))
        ids, shares, rest = (torch.cat(found) for found in zip(*parts, strict=True))
        shape = (-1, identity.sequence_length, identity.top_k)
        return Said(ids.view(shape).numpy(), shares.view(shape).numpy(), rest.view(shape[:2]).numpy())
