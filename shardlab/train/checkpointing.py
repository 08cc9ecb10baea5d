"""The checkpoints of a run: when one is saved, what is in it beside the tensors, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.backends.masked import MaskedReader
from shardlab.checkpoint import AsyncSaver, CheckpointReader, Contents, Ranks, Saver, find_newest, verify_together
from shardlab.checkpoint.listing import checkpoints
from shardlab.checkpoint.manifest import MANIFEST, Manifest
from shardlab.errors import UserError
from shardlab.planner.around import most_checkpoints
from shardlab.recipe import Recipe
from shardlab.runtime.stopping import REQUEST
from shardlab.state.masks import Masks

if TYPE_CHECKING:
    from shardlab.train.engine import Engine

DIRECTORY = "checkpoints"
_PACKAGES = ("accelerate", "deepspeed", "shardlab", "transformers")


class Checkpoints:
    """Saves a run's state when the recipe, a stop or a signal asks for it. All methods are collective."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        ranks: Ranks,
        data: Mapping[str, Any],
        *,
        parent: str | None = None,
        say: Callable[[str], None] = print,
    ):
        """`root`: the run's checkpoints/. `data` identifies what the cursor counts, see `data_identity`."""
        section = engine.recipe.checkpoint
        self.root = root
        self._engine = engine
        self._section = section
        self._ranks = ranks
        self._data = data
        self._parent = parent
        self._say = say
        self._saver = Saver(root, ranks, keep=section.keep)
        # In the background the whole state would be copied, which backend stream has no memory for.
        background = section.asynchronous and engine.plan.backend != "stream"
        self._background = AsyncSaver(self._saver) if background else None
        self._saved: int | None = None  # the step of the newest one, being written or whole
        self.failures: list[str] = []

    def prepare(self) -> None:
        """Before the first step: raise UserError if what will be saved can't be written."""
        if most_checkpoints(self._engine.recipe):
            self._saver.trial()

    def stop_is_asked_for(self) -> bool:
        """Whether any rank was signalled; the same on all."""
        return not self._ranks.all(not REQUEST.came)

    def after_step(self, evaluation: float | None) -> None:
        """Save if it is time; hear of a save in the background. Raises what that failed of, by policy."""
        step = self._engine.steps_done
        due = self._section.every is not None and step % self._section.every == 0
        if self._background is not None:
            self._guarded(self._background.poll)
        if due:
            self._guarded(lambda: self._start(evaluation))

    def save_now(self, evaluation: float | None = None) -> Path:
        """The state after the last step, on disk and whole when this returns its directory."""
        step = self._engine.steps_done
        if self._background is not None:
            self._guarded(self._background.wait)
        if self._saved != step:
            self._save(self._contents(evaluation))
            self._saved = step
        return self.root / f"step-{step:08d}"

    def finish(self) -> None:
        """Wait for what is being written. Raises UserError if any save of the run has failed."""
        if self._background is not None:
            self._guarded(self._background.close)
            self._background = None
        if self.failures:
            raise UserError(
                f"{len(self.failures)} of the run's checkpoints were not saved (the model is); the last failed with: "
                f"{self.failures[-1]}"
            )

    def _start(self, evaluation: float | None) -> None:
        contents = self._contents(evaluation)
        fragments = self._engine.backend.fragments
        if self._background is not None:
            self._background.save(contents, fragments)
        else:
            self._save(contents)
        self._saved = contents.step

    def _save(self, contents: Contents) -> None:
        """Here and now. Backend stream's fragments are mapped files."""
        mapped = self._engine.plan.backend == "stream"
        with self._engine.meter.left_out() if mapped else nullcontext():
            self._saver.save(contents, self._engine.backend.fragments)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Do it; a failure that the user can mend is raised or counted, by policy. It is one on all ranks."""
        try:
            action()
        except UserError as error:
            self._saved = None
            if self._section.on_failure == "stop":
                raise
            self.failures.append(f"{error}")
            if self._engine.topology.is_main:
                self._say(f"a checkpoint was not saved: {error}")

    @cached_property
    def _attachments(self) -> dict[str, bytes]:
        """Config and tokenizer, which stay the same; made when the first checkpoint is."""
        return self._engine.model_files() if self._engine.topology.is_main else {}

    def _contents(self, evaluation: float | None) -> Contents:
        engine = self._engine
        return Contents(
            step=engine.steps_done,
            optimizer=engine.backend.optimizer_state(),
            aliases=engine.module.aliases,
            schedule=schedule_state(engine),
            cursor={"samples": engine.steps_done * engine.plan.global_batch_size, **self._data},
            recipe=engine.recipe.model_dump(mode="json"),
            plan=asdict(engine.plan),
            versions={name: version(name) for name in _PACKAGES},
            attachments=self._attachments,
            parent=self._parent,
            evaluation=evaluation,
        )


def schedule_state(engine: Engine) -> dict[str, Any]:
    """What the rates of the steps to come follow from."""
    train = engine.recipe.train
    return {
        **train.schedule.model_dump(mode="json"),
        "steps": train.steps,
        "peak": engine.peak_learning_rate,
        "applied": engine.applied,
        "nonfinite_steps": engine.nonfinite_steps,
    }


def data_identity(data: Any, recipe: Recipe) -> dict[str, Any]:
    """What has to be the same for a position in the data to mean the same samples."""
    rows = len(data.train) if hasattr(data.train, "__len__") else None
    return {
        "global_batch_size": recipe.train.global_batch_size,
        "seed": recipe.train.seed,
        "rows": rows,
        "text": getattr(data, "fingerprint", None),
    }


def own_loop_identity(recipe: Recipe) -> dict[str, Any]:
    """The same of a user's own loop, whose data is not ours to know."""
    return {"global_batch_size": recipe.train.global_batch_size, "seed": recipe.train.seed, "rows": None, "text": None}


@dataclass(frozen=True)
class Resumption:
    """The checkpoint to go on from."""

    path: Path
    manifest: Manifest


def find_resumption(resume: str, output: Path, ranks: Ranks, say: Callable[[str], None]) -> Resumption | None:
    """What `--resume` means: "auto" is the newest whole checkpoint of `output`, if there is any; else a directory.

    A directory is a run's, or one checkpoint's. Collective: all files are verified first, each by one rank. Raises
    UserError where a directory was given and holds no whole checkpoint.
    """
    if resume == "auto":
        # The first rank looks for all: a slower one must not find what another has just made.
        if not ranks.gather(bool(checkpoints(output / DIRECTORY)) if ranks.rank == 0 else None)[0]:
            return None
        path = find_newest(output, ranks, say)
    elif (Path(resume) / MANIFEST).exists():
        path = Path(resume)
        verify_together(path, ranks)
    else:
        path = find_newest(Path(resume), ranks, say)
    with CheckpointReader(path) as reader:
        return Resumption(path, reader.manifest)


def check_resumption(found: Resumption, engine: Engine, data: Mapping[str, Any], *, reset_schedule: bool) -> None:
    """Raises UserError where the run would not be the one that was stopped, naming the first thing that differs."""
    cursor, saved = found.manifest.cursor, found.manifest.schedule
    names = {
        "global_batch_size": "train.global_batch_size",
        "seed": "train.seed",
        "rows": "the number of rows that the data makes",
        "text": "the text, its tokenizer or its split",
    }
    for key, name in names.items():
        if cursor.get(key) is not None and data[key] is not None and cursor[key] != data[key]:
            change = f"{cursor[key]} there, {data[key]} here" if key != "text" else "by their fingerprints"
            raise UserError(
                f"{name} is not what {found.path} was trained with ({change}): resume needs the same samples in the "
                "same order; set it back, or start a new run"
            )
    if reset_schedule:
        return
    if "applied" not in saved:
        raise UserError(
            f"{found.path} has no schedule of ours in it: --reset-schedule takes the recipe's, from step "
            f"{found.manifest.step} on"
        )
    now = schedule_state(engine)
    for key in sorted((saved.keys() | now.keys()) - {"applied", "nonfinite_steps"}):
        if saved.get(key) != now.get(key):
            name = {"steps": "train.steps", "peak": "train.optimizer.lr"}.get(key, f"train.schedule.{key}")
            raise UserError(
                f"{name} is {now.get(key)}, but {saved.get(key)} in {found.path}: the learning rate would jump. Set it "
                "back, or take the recipe's schedule from here on with --reset-schedule"
            )


def restore(engine: Engine, found: Resumption) -> None:
    """Give the engine the checkpoint's state, whatever backend and world size it was saved by. Collective."""
    if not engine.masks and engine.recipe.model.keep_masks:  # a loop of one's own need not give them again
        there = Masks.read(found.path).checked(engine.module.shapes, engine.module.aliases)
        engine.masks.packed.update(there.packed)
    with CheckpointReader(found.path) as reader:
        engine.backend.load(MaskedReader(reader, engine.masks) if engine.masks else reader)
    schedule = found.manifest.schedule
    engine.steps_done = found.manifest.step
    engine.applied = _whole_number(schedule.get("applied"), found.manifest.step)
    engine.nonfinite_steps = _whole_number(schedule.get("nonfinite_steps"), 0)


def _whole_number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
