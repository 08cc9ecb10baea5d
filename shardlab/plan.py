"""The plan: where training state lives and how a step runs. Pure data; `planner` makes it, `backends` carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, get_args

BackendName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "stream"]
Precision = Literal["fp32", "bf16"]
Place = Literal["none", "cpu"]
Elsewhere = Literal["none", "cpu", "disk"]
Recompute = Literal["none", "selective", "full"]  # see `model/policies.py`
# Whose training loop a prediction is of: ours, or a plain Hugging Face one, with weights in fp32 (and autocast where
# the precision is bf16) or in bf16.
Loop = Literal["shardlab", "hf", "hf-bf16"]


@dataclass(frozen=True)
class Offload:
    """Where parameters, optimizer state (masters and moments) and activations live between uses: "none": on the device.

    Activations are what the blocks save for their backward pass. On the disk they lie in `directory` (None: the run's
    own), and take at most `disk_limit` bytes of it on each rank.
    """

    parameters: Place = "none"
    optimizer: Place = "none"
    activations: Elsewhere = "none"
    directory: str | None = None
    disk_limit: int | None = None


@dataclass(frozen=True)
class Stream:
    """How backend stream uses memory and disk, and in what its files hold masters, moments and gradients.

    `memory_limit`: bytes that the process may take, libraries included; None: what the machine or its cgroup has.
    `activation_bytes`: of the blocks' inputs that stay in memory; None: all. `directory`: where each run gets one of
    its own; None: in the run's directory.
    """

    memory_limit: int | None = None
    activation_bytes: int | None = None
    directory: str | None = None
    masters: Literal["fp32", "bf16"] = "fp32"
    moments: Literal["fp32", "8bit"] = "fp32"
    gradients: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class Plan:
    """Every value is resolved: nothing here is "auto".

    `micro_batch` and `global_batch_size` are sequences; `micro_batch * accumulation * world_size == global_batch_size`.
    """

    backend: BackendName
    world_size: int
    micro_batch: int
    accumulation: int
    global_batch_size: int
    precision: Precision
    recompute: Recompute = "none"
    recompute_blocks: int | None = None  # so many of the first blocks; None: all. The others keep everything
    recompute_fits: bool = False  # whether `recompute_blocks` is found by the memory that there is, or by the limit:
    memory_limit: int | None = None  # bytes of a rank's process
    reshard_after_forward: bool = True
    shared_memory: bool = True  # fsdp: CPU ranks of one host exchange through it
    replicas: int = 1  # fsdp: groups of ranks that hold the model whole between them (HSDP)
    keep_freed: bool = False  # host memory that a step frees is not returned to the system
    offload: Offload = field(default_factory=Offload)
    stream: Stream = field(default_factory=Stream)
    clip_grad_norm: float | None = 1.0
    compile: bool = False  # each block, by torch.compile
    seed: int = 0
    timeout_seconds: float = 600.0
    reasons: tuple[str, ...] = ()  # one line for each value that was "auto": what it became and why


Kind = Literal[
    "parameters",
    "gradients",
    "masters",
    "moments",
    "activations",
    "head",
    "logits",
    "communication",
    "temporaries",
    "snapshot",
    "libraries",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Bytes = Mapping[Kind, int]

ROOT = 0  # the unit of what is in no other: embeddings that are tied, a norm before the blocks


@dataclass(frozen=True)
class ParameterShape:
    """One parameter, a tied one once. `unit`: `ROOT`, a block's number from 1, or one of `ModelShape`'s."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    unit: int

    @cached_property  # a survey asks for it millions of times
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """What a backend has to place: the parameters in the module's order, and the units that it may gather."""

    parameters: tuple[ParameterShape, ...]
    blocks: int
    has_tail: bool
    table: str | None = None  # name of the input embedding's weight, a row for each entry of the vocabulary
    head: str | None = None  # name of the head's weight; the table's own where they are tied
    after: tuple[str, ...] = ()  # names of what else the head's module has: the final norm, a bias

    @property
    def tail(self) -> int:
        """The unit of final norm, head and loss; empty where the head is tied."""
        return self.blocks + 1

    @property
    def embedding(self) -> int:
        """The unit of an embedding of its own."""
        return self.blocks + 2

    def numel(self, *, trainable: bool | None = None) -> int:
        """Elements of all parameters, or of those that are trained, or are not."""
        return sum(p.numel for p in self.parameters if trainable in (None, p.trainable))

    def unit(self, index: int) -> tuple[ParameterShape, ...]:
        """The parameters of one unit."""
        return self._units.get(index, ())

    @cached_property
    def _units(self) -> Mapping[int, tuple[ParameterShape, ...]]:
        units: dict[int, list[ParameterShape]] = {}
        for parameter in self.parameters:
            units.setdefault(parameter.unit, []).append(parameter)
        return {index: tuple(parameters) for index, parameters in units.items()}


@dataclass(frozen=True)
class Work:
    """What there is to compute.

    `products` and `attention` are floating-point operations, in matrix products and in attention's own kernels; `moved`
    is bytes that everything else reads and writes; `operations` is the number of operators started.
    """

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.moved + other.moved,
            self.operations + other.operations,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.products * times, self.attention * times, self.moved * times, self.operations * times)


@dataclass(frozen=True)
class Span:
    """One segment's forward or backward pass in one micro-batch; bytes of tensors that are no parameters.

    `segment` is `ROOT`, a block's number or `ModelShape.tail`. `entry` and `exit` are live at its borders, `peak` at
    its highest point; `work` is what it computes. `away`: bytes that it saves elsewhere, on the host or on the disk.
    """

    phase: Literal["forward", "backward"]
    segment: int
    entry: Bytes
    peak: Bytes
    exit: Bytes
    work: Work = Work()
    away: int = 0


Timeline = tuple[Span, ...]


@dataclass(frozen=True)
class Moment:
    """A point of a step and the bytes that one rank's tensors take there, by kind."""

    name: str
    bytes: Bytes
    host: Bytes = field(default_factory=dict)  # on the host, where that is another memory: offloaded state

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Disk:
    """Bytes that a plan keeps in files, and those that a step reads from them and writes to them."""

    bytes: int
    read: int
    written: int


@dataclass(frozen=True)
class Phase:
    """A part of a run beside its steps: the process's memory above its libraries, of the rank that takes most.

    In the memory that computes it lies between `low` and `high`; `host` is on the host, where that is another memory.
    """

    low: int
    high: int
    host: int = 0


@dataclass(frozen=True)
class Around:
    """What a run takes before, beside and after its steps.

    `building`: until the backend has the model, its weights made or read. `writing`: while the model is written at the
    end. `snapshot`: bytes of host memory on a rank that a save in the background copies into, kept from the first one
    on. On the disk, over all ranks: `checkpoint` is one, of which there are `checkpoints` at most at once; `model`.
    """

    building: Phase
    writing: Phase
    snapshot: int
    checkpoint: int
    checkpoints: int
    model: int

    @property
    def disk(self) -> int:
        """Bytes that the run leaves room for, at most at once."""
        return self.checkpoint * self.checkpoints + self.model


@dataclass(frozen=True)
class Footprint:
    """Predicted peak of one rank.

    `bytes` by kind at the moment of the peak, and in `host` what is offloaded to another memory. `tensors` is what the
    allocator hands out at most. The process's memory, above its libraries, lies between `low` and `high`.
    """

    moment: str
    bytes: Bytes
    host: Bytes
    tensors: int
    low: int
    middle: int
    high: int
    libraries: int  # beside the tensors, in the same memory: code and its data, or a device's context
    host_libraries: int  # with an accelerator: the same of the process on the host
    disk: Disk | None = None  # of a backend that keeps its state in files
    around: Around | None = None  # beside the steps; of our own loop

    @property
    def highest(self) -> int:
        """The upper end over the whole run, in the memory that computes."""
        around = self.around
        return self.high if around is None else max(self.high, around.building.high, around.writing.high)

    @property
    def where(self) -> str:
        """In what part of the run the upper end is that high."""
        if self.around is not None and self.highest > self.high:
            building = self.around.building.high == self.highest
            return "building of the model" if building else "writing of the model at the end"
        return self.moment

    @property
    def surely(self) -> int:
        """The lower end of the same."""
        around = self.around
        return self.low if around is None else max(self.low, around.building.low, around.writing.low)

    @property
    def on_host(self) -> int:
        """The most on the host over the whole run, where that is another memory; without the libraries."""
        around, steps = self.around, sum(self.host.values())
        return steps if around is None else max(steps, around.building.host, around.writing.host)
