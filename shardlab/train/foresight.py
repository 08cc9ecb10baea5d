"""What the planner says of a run: refused before its weights are made where it cannot fit, and compared at its end.

Before the run only the state's size is added up, which costs nothing; the step is traced where that is a good part of
the memory that there is. Otherwise it is traced at the end, so that the trace's own memory does not lie under the
measured peak.
"""

from typing import Any

import torch
from torch import nn

from shardlab.backends.base import all_reduce_sum
from shardlab.errors import UserError
from shardlab.plan import Footprint, Plan
from shardlab.planner.calibration import measured
from shardlab.planner.machine import Machine, this_machine
from shardlab.planner.names import gib, name, settings
from shardlab.planner.predict import Predictor, floor_bytes
from shardlab.planner.resolve import resolve
from shardlab.planner.search import assess, predictor, survey
from shardlab.planner.streaming import fitted
from shardlab.recipe import Recipe
from shardlab.topology import Topology

WORTH_A_TRACE = 0.35  # of the memory there is


class Foresight:
    """The prediction for one run on this rank; `vocabulary` is the tokenizer's size."""

    def __init__(self, recipe: Recipe, plan: Plan, topology: Topology, vocabulary: int):
        self._recipe = recipe
        self._plan = plan
        self._topology = topology
        self._vocabulary = vocabulary
        self._machine = _machine(topology)
        self._predictor: Predictor | None = None

    def fit(self, model: nn.Module) -> Plan:
        """The plan as it is to be run; see `refuse_what_cannot_fit`.

        Backend stream is laid out by its memory limit here, which is refused where no layout is small enough.
        """
        if self._plan.backend != "stream":
            self.refuse_what_cannot_fit(model)
        elif not self._machine.accelerator:
            self._plan = self._fit_stream()
        elif self._plan.stream.memory_limit is not None:
            raise UserError("shard.memory_limit is the host's on a machine without an accelerator; leave it out here")
        return self._plan

    def _fit_stream(self) -> Plan:
        try:
            predict = self._predict()
            predict.footprint(self._plan)
        except UserError as error:  # a model that has no trace
            if self._plan.stream.memory_limit is None:
                return self._plan
            raise UserError(f"shard.memory_limit needs a prediction to be kept, and there is none: {error}") from error
        return fitted(self._plan, predict, self._machine)

    def refuse_what_cannot_fit(self, model: nn.Module) -> None:
        """Raises UserError, on every rank, where even the lowest estimate is more than the memory that there is.

        `model` is the whole model, its parameters on the meta device or not. Every rank calls this.
        """
        message = self._complaint(model)
        refused = torch.tensor(float(message is not None), device=self._topology.device)
        if all_reduce_sum(refused, self._topology) > 0:
            raise UserError(message or "the plan does not fit the memory of another rank's host")

    def _complaint(self, model: nn.Module) -> str | None:
        least = floor_bytes(model, self._plan, self._recipe.train.optimizer, accelerator=self._machine.accelerator)
        if least < WORTH_A_TRACE * self._machine.memory_bytes or self._unknown() is not None:
            return None
        try:
            own = assess(self._plan, self._predict(), self._machine)
        except UserError:  # a model that has no trace: `compare` says so
            return None
        short = own.footprint.low - own.footprint.high - own.left_bytes
        if short <= 0:
            return None
        needs = own.footprint.high + own.footprint.libraries
        text = (
            f"this plan ({name(self._plan)}) does not fit: each of {self._plan.world_size} ranks would need about "
            f"{gib(needs)} GiB, and has {gib(self._machine.memory_bytes)}; over by {gib(-own.left_bytes)} GiB, in the "
            f"{own.footprint.moment}"
        )
        found = survey(self._recipe, self._machine, self._plan, self._predict())
        fitting = sorted((c for c in found.candidates if c.fits), key=lambda c: -c.left_bytes)
        if found.best is None or not fitting:
            if found.stream is not None:
                return f"{text}. What fits, with the state on the disk: {settings(found.stream.plan)}"
            return f"{text}; no other plan for {self._plan.world_size} ranks here fits either: see `shardlab plan`"
        choices = [found.best, *fitting[:1]] if fitting[0] != found.best else [found.best]
        others = "; or ".join(f"{settings(c.plan)} ({gib(c.left_bytes)} GiB left)" for c in choices)
        return f"{text}. What fits: {others}"

    def _unknown(self) -> str | None:
        """Why nothing can be predicted, if so."""
        return "the rows are of a builder's own" if self._recipe.data.builder is not None else None

    def _predict(self) -> Predictor:
        if self._predictor is None:
            self._predictor = predictor(self._recipe, self._machine, self._vocabulary)
        return self._predictor

    def compare(self, base: list[int], peak: list[int]) -> tuple[dict[str, Any] | None, str]:
        """For the summary and for people: predicted beside measured, which are of each rank and include the base."""
        measured = max(high - low for high, low in zip(peak, base, strict=True))
        said = f"peak memory of a rank: {_mib(measured)} MiB above the libraries"
        reason = self._unknown()
        if reason is None:
            try:
                footprint = self._predict().footprint(self._plan)
            except UserError as error:  # a model that has no trace
                reason = str(error)
            else:
                inside = f"predicted {_mib(footprint.low)} to {_mib(footprint.high)}, in the {footprint.moment}"
                return _as_dict(footprint), f"{said}; {inside}"
        return None, f"{said}; not predicted: {reason}"

    def compare_time(self, measured: float | None) -> tuple[float | None, str | None]:
        """For the summary and for people: predicted seconds of a step beside the `measured` ones.

        None where nothing is known of the machine's speed, or nothing was predicted.
        """
        try:
            known = self._unknown() is None
            cost = self._predict().cost(self._plan, self._machine) if known else None
        except UserError:  # a model that has no trace: `compare` says so
            cost = None
        if cost is None:
            return None, None
        took = f"a step took {measured:.3g} s; " if measured is not None else ""
        rates = self._machine.rates
        return cost.seconds, f"{took}predicted {cost.seconds:.3g}, by rates {rates.source if rates else ''}"


def after_a_kill(recipe: Recipe, ranks: int) -> str | None:
    """What the plan for `ranks` on this host had predicted; None where it has no prediction.

    For a job of which the system killed a rank: it says nothing else of why.
    """
    machine = this_machine(ranks)
    try:
        plan = resolve(recipe, world_size=ranks)
        own = assess(plan, predictor(recipe, machine), machine)
    except UserError:
        return None
    low, high = (size + own.footprint.libraries for size in (own.footprint.low, own.footprint.high))
    text = (
        f"the plan ({name(plan)}) had predicted {gib(low)} to {gib(high)} GiB a rank at most, in the "
        f"{own.footprint.moment}; there are {gib(machine.memory_bytes)} for each"
    )
    return text if own.fits else f"{text}: see `shardlab plan` for what fits"


def _machine(topology: Topology) -> Machine:
    host = topology.host_memory_bytes // topology.local_world_size
    device = topology.device_memory_bytes
    rates = measured(topology.local_world_size, accelerator=device is not None)
    ranks, nodes = topology.world_size, topology.nodes
    return Machine("this machine", ranks, device is not None, device or host, host, nodes, rates)


def _as_dict(footprint: Footprint) -> dict[str, Any]:
    return {
        "low": footprint.low,
        "middle": footprint.middle,
        "high": footprint.high,
        "tensors": footprint.tensors,
        "moment": footprint.moment,
        "by_kind": dict(footprint.bytes),
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
