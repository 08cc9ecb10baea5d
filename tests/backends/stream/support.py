"""Small jobs on backend stream, and the same on ddp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

from shardlab.backends import make_backend
from shardlab.backends.base import Applied, Job
from shardlab.backends.stream import engine as stream_engine
from shardlab.backends.stream.engine import StreamBackend
from shardlab.backends.stream.layout import lay_out
from shardlab.backends.stream.store import disk_bytes
from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.model.deferred import build_deferred
from shardlab.model.trainable import make_trainable
from shardlab.plan import Offload, Plan, Stream
from shardlab.planner.resolve import kept_as
from shardlab.recipe import SGD, AdamW
from shardlab.topology import Topology
from tests.model.families import CONFIGS, batch

ALONE = Topology(0, 1, 0, 1, 0, 1, "cpu", host_memory_bytes=1 << 30, device_memory_bytes=None, launcher="none")
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One job. `rows_elements`: the largest range of the vocabulary's rows, so that a tiny one comes in several."""

    family: str = "llama"
    precision: str = "fp32"
    clip: float | None = 0.3
    accumulation: int = 3
    optimizer: AdamW | SGD = ADAMW
    lr: float = 1e-2
    freeze: Callable[[str], bool] = lambda name: False
    rows_elements: int | None = None
    activation_bytes: int | None = None
    recompute_blocks: int | None = None  # the others' own activations go to the disk
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model
    config: Callable[[], Any] | None = None
    seed: int = 0  # of the initial values


@dataclass
class Outcome:
    """What a job came to."""

    applied: list[Applied] = field(default_factory=list)
    evaluation: tuple[float, int] = (0.0, 0)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [one.loss_sum / one.tokens for one in self.applied]

    @property
    def norms(self) -> list[float]:
        return [one.grad_norm for one in self.applied]


def window(step: int, count: int = 3) -> Window:
    """`count` micro-batches with unlike numbers of targets, the same again every five steps."""
    parts = []
    for i in range(count):
        one = batch(seed=10 * (step % 5) + i)
        one["targets"][:, : 4 * i] = IGNORED
        parts.append(MicroBatch(one, i))
    return Window(step, tuple(parts), sum(int((p.tensors["targets"] != IGNORED).sum()) for p in parts))


@contextmanager
def running(
    case: Case, backend: str = "stream", directory: Path | None = None, *, resume: bool = False
) -> Iterator[Any]:
    """The case's model on a backend, ready for a window."""
    config = case.config or CONFIGS[case.family]

    def build() -> nn.Module:
        import transformers

        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config())
        return case.adapt(model)

    model, weights = build_deferred(build, case.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not case.freeze(name))
    plan = Plan(backend, 1, 2, case.accumulation, 2 * case.accumulation, case.precision, clip_grad_norm=case.clip)
    small = kept_as(case.optimizer) if backend == "stream" else {}
    plan = replace(plan, stream=Stream(activation_bytes=case.activation_bytes, **small))
    if case.recompute_blocks is not None and backend == "stream":
        plan = replace(plan, recompute_blocks=case.recompute_blocks, offload=Offload(activations="disk"))
    job = Job(make_trainable(model, seed=7).train(), plan, case.optimizer, ALONE, directory, resume)
    engine = make_backend(plan)
    with mock.patch.object(stream_engine, "lay_out", partial(lay_out, rows_elements=case.rows_elements)):
        engine.prepare(job, weights)
    try:
        yield engine
    finally:
        engine.close()


def train(case: Case, backend: str = "stream", steps: int = 6, *, directory: Path | None = None) -> Outcome:
    """Train, evaluate, and take the weights."""
    outcome = Outcome()
    with running(case, backend, directory) as engine:
        for step in range(steps):
            outcome.applied.append(engine.run_window(window(step, case.accumulation), case.lr))
        outcome.evaluation = engine.evaluate(window(99, 5).micro_batches)
        outcome.tensors = whole(engine)
    return outcome


def whole(engine: Any) -> dict[str, Tensor]:
    """Copies of all tensors."""
    return {name: tensor.clone() for name, tensor in engine.tensors()}


def relative(value: Tensor, reference: Tensor) -> float:
    """Relative L2 difference."""
    return float((value.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))


def state_of(engine: StreamBackend) -> dict[tuple[str, str, Any], Tensor]:
    """Copies of all fragments, by name, kind and box."""
    return {(f.name, f.kind, f.box): f.data.clone() for f in engine.fragments()}


def kept(engine: StreamBackend, directory: Path) -> int:
    """Bytes of the state's files, which are those that its form says."""
    files = [path for path in directory.iterdir() if path.name.split("-")[0] in ("state", "gradient", "frozen")]
    size = sum(file.stat().st_size for file in files)
    assert size == disk_bytes(engine._store.form, engine._store.layout)
    return size


def segments(engine: StreamBackend) -> dict[str, int]:
    """How many segments there are of each role."""
    roles = [segment.role for segment in engine._store.layout.segments]
    return {role: roles.count(role) for role in roles}
