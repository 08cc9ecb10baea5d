"""What the planner says of a run: refused before its weights are made where it cannot fit, and compared at its end.

Before the run only the state's size is added up, which costs nothing; the step is traced where that is a good part of
the memory that there is. Otherwise it is traced at the end, so that the trace's own memory does not lie under the
measured peak.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab.backends.base import all_reduce_sum
from shardlab.backends.placement import Setting
from shardlab.checkpoint.listing import checkpoints
from shardlab.checkpoint.storage import LocalStorage, spelled_bytes
from shardlab.errors import UserError
from shardlab.plan import Footprint, ModelShape, Offload, Phase, Plan
from shardlab.planner.around import Saving, most_checkpoints, on_disk
from shardlab.planner.calibration import measured
from shardlab.planner.choose import agreeing, choose, is_open
from shardlab.planner.fewest import fewest_recomputed
from shardlab.planner.machine import Machine
from shardlab.planner.names import gib, name, settings
from shardlab.planner.predict import Predictor, floor_bytes, untraced
from shardlab.planner.search import Candidate, assess, predictor, survey
from shardlab.planner.streaming import fitted
from shardlab.recipe import Recipe
from shardlab.runtime.extensions import zero_unavailable_reason
from shardlab.state.masks import kept_masks
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
        self._saving = Saving.of(recipe)
        self._predictor: Predictor | None = None
        self._state_bytes = 0  # of a rank, without a trace
        self.teacher: ModelShape | None = None  # of a distillation

    def choose(self, model: nn.Module) -> Plan:
        """The plan with the backend that becomes of `auto`: the first rank's choice. Every rank calls this."""
        if not is_open(self._recipe, self._plan):
            return self._plan
        chosen = [self._chosen(model) if self._topology.is_main else None]
        if self._topology.world_size > 1:
            dist.broadcast_object_list(chosen, 0)
        assert chosen[0] is not None
        self._plan = chosen[0]
        return self._plan

    def _chosen(self, model: nn.Module) -> Plan:
        """By `resolve`'s rule where there is nothing to choose, or no trace to choose by."""
        ruled, machine = self._plan, self._machine
        alone = machine.ranks == 1 and not machine.accelerator
        if self._unknown() is not None or (alone and not self._is_large(model)):
            return ruled
        agrees, usable = agreeing(self._recipe, ruled), zero_unavailable_reason() is None
        try:
            found = survey(
                self._recipe,
                machine,
                ruled,
                self._predict(),
                keep=lambda plan: agrees(plan) and (usable or not plan.backend.startswith("zero")),
            )
        except UserError as error:  # a model that has no trace
            return replace(ruled, reasons=(*ruled.reasons, f"by a rule, without a prediction: {error}"))
        return choose(found, ruled)

    def _is_large(self, model: nn.Module) -> bool:
        """Whether the state alone is a good part of the memory that there is."""
        setting = self._untraced(model)
        self._state_bytes = floor_bytes(setting, self._saving)
        return self._state_bytes >= WORTH_A_TRACE * self._machine.memory_bytes

    def _untraced(self, model: nn.Module) -> Setting:
        return untraced(
            model,
            self._plan,
            self._recipe.train.optimizer,
            accelerator=self._machine.accelerator,
            teacher=self.teacher,
            masked=kept_masks(self._recipe.model).nbytes,
        )

    def fit(self, model: nn.Module, output: Path, saved: Path) -> Plan:
        """The plan as it is to be run; see `refuse_what_cannot_fit`. `saved`: where the checkpoints lie.

        Backend stream is laid out by its memory limit here, which is refused where no layout is small enough.
        """
        complaint = self._no_room(model, output, saved) if self._topology.is_main else None
        self._agree(complaint, "the run does not fit the disk of the first rank")
        if self._plan.recompute_fits:
            self._plan = self._fewest_recomputed()
        if self._plan.backend != "stream":
            self.refuse_what_cannot_fit(model)
        elif not self._machine.accelerator:
            self._plan = self._fit_stream(output)
        elif self._plan.stream.memory_limit is not None:
            raise UserError("shard.memory_limit is the host's on a machine without an accelerator; leave it out here")
        return self._plan

    def _fewest_recomputed(self) -> Plan:
        """The same number of blocks on every rank, the most that one of them needs: what they gather depends on it."""
        found, message = self._plan, None
        try:
            found = fewest_recomputed(self._plan, self._predict(), self._machine)
        except UserError as error:
            message = str(error)
        self._agree(message, "recompute auto: no number of blocks fits the memory of another rank's host")
        blocks = self._predict().shape.blocks
        chosen = torch.zeros(blocks + 1, device=self._topology.device)
        chosen[0 if found.recompute == "none" else found.recompute_blocks] = 1.0
        most = int(all_reduce_sum(chosen, self._topology).nonzero().max())
        if not most:
            return replace(found, recompute="none", recompute_blocks=None)
        return replace(found, recompute="full", recompute_blocks=most)

    def _fit_stream(self, output: Path) -> Plan:
        try:
            predict = self._predict()
            predict.footprint(self._plan)
        except UserError as error:  # a model that has no trace
            if self._plan.stream.memory_limit is None:
                return self._plan
            raise UserError(f"shard.memory_limit needs a prediction to be kept, and there is none: {error}") from error
        return fitted(self._within_the_disk(self._plan, predict, output), predict, self._machine)

    def _within_the_disk(self, plan: Plan, predict: Predictor, output: Path) -> Plan:
        """Where activations may go to the disk without a limit, they get what the state and the checkpoints leave."""
        offload = plan.offload
        if offload.activations != "disk" or offload.disk_limit is not None:
            return plan
        found = predict.footprint(replace(plan, offload=Offload(), recompute_blocks=None))
        assert found.disk is not None
        free = LocalStorage().free_bytes(output if offload.directory is None else Path(offload.directory))
        left = free - found.disk.bytes - (found.around.disk if found.around is not None else 0)
        return replace(plan, offload=replace(offload, disk_limit=max(0, left)))

    def refuse_what_cannot_fit(self, model: nn.Module) -> None:
        """Raises UserError, on every rank, where even the lowest estimate is more than the memory that there is.

        `model` is the whole model, its parameters on the meta device or not. Every rank calls this.
        """
        self._agree(self._complaint(model), "the plan does not fit the memory of another rank's host")

    def _agree(self, message: str | None, elsewhere: str) -> None:
        """Raises UserError on every rank where one has something to say."""
        refused = torch.tensor(float(message is not None), device=self._topology.device)
        if all_reduce_sum(refused, self._topology) > 0:
            raise UserError(message or elsewhere)

    def _no_room(self, model: nn.Module, output: Path, saved: Path) -> str | None:
        """Why the disk is too small for the checkpoints and the model, and what would fit it."""
        setting = self._untraced(model)
        each, written = on_disk(setting, self._saving)
        free, there = LocalStorage().free_bytes(output), len(checkpoints(saved))

        def needed(count: int) -> int:
            return max(0, count - there) * each + written

        count = self._saving.checkpoints
        if needed(count) <= free:
            return None
        parts = [f"{count} checkpoints of {spelled_bytes(each)} at once"] if count else []
        parts += [f"the model of {spelled_bytes(written)}"]
        text = (
            f"disk full: {' and '.join(parts)} need {spelled_bytes(needed(count))} more, "
            f"{output} has {spelled_bytes(free)} free"
        )
        mends = ["make room there, or set another --output"]
        if count and needed(0) <= free:
            fewer = (
                keep for keep in range(self._recipe.checkpoint.keep - 1, 0, -1) if needed(self._kept(keep)) <= free
            )
            keep = next(fewer, None)
            mends += ["set checkpoint.every=null" if keep is None else f"set checkpoint.keep={keep}"]
        return f"{text}: {', or '.join(mends)}"

    def _kept(self, keep: int) -> int:
        section = self._recipe.checkpoint.model_copy(update={"keep": keep})
        return most_checkpoints(self._recipe.model_copy(update={"checkpoint": section}))

    def _complaint(self, model: nn.Module) -> str | None:
        if not self._is_large(model) or self._unknown() is not None:
            return None
        try:
            own = assess(self._plan, self._predict(), self._machine)
        except UserError:  # a model that has no trace: `compare` says so
            return None
        short = own.footprint.surely - own.footprint.highest - own.left_bytes
        if short <= 0:
            return None
        needs = own.footprint.highest + own.footprint.libraries
        text = (
            f"this plan ({name(self._plan)}) does not fit: each of {self._plan.world_size} ranks would need about "
            f"{gib(needs)} GiB, and has {gib(self._machine.memory_bytes)}; over by {gib(-own.left_bytes)} GiB, in the "
            f"{own.footprint.where}"
        )
        written_at_once = self._synchronous()
        if written_at_once is not None and written_at_once.fits:
            text += (
                f". What fits: --set checkpoint.asynchronous=false, without a copy of the state "
                f"({gib(written_at_once.left_bytes)} GiB left)"
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

    def _synchronous(self) -> Candidate | None:
        """The plan with saves that the steps wait for, where they would be made in the background."""
        if not self._saving.copies:
            return None
        predict = self._predict()
        before, predict.saving = predict.saving, replace(self._saving, copies=False, during=False)
        try:
            return assess(self._plan, predict, self._machine)
        finally:
            predict.saving = before

    def _unknown(self) -> str | None:
        """Why nothing can be predicted, if so."""
        return "the rows are of a builder's own" if self._recipe.data.builder is not None else None

    def _predict(self) -> Predictor:
        if self._predictor is None:
            self._predictor = predictor(self._recipe, self._machine, self._vocabulary)
        return self._predictor

    def foreseen(self) -> dict[str, Any]:
        """What is known before the weights are made, for `after_a_kill`; the step only where it is traced by then."""
        try:
            footprint = self._predictor.footprint(self._plan) if self._predictor is not None else None
        except UserError:  # a model that has no trace
            footprint = None
        return {
            "plan": name(self._plan),
            "state_bytes": self._state_bytes,
            "memory_bytes": self._machine.memory_bytes,
            "vocabulary": self._vocabulary,
            "predicted": as_dict(footprint) if footprint is not None else None,
        }

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
                return as_dict(footprint), f"{said}; {inside}"
        return None, f"{said}; not predicted: {reason}"

    def compare_around(self, base: list[int], building: list[int], writing: list[int] | None) -> str | None:
        """For people: what was measured around the steps, of each rank, beside the prediction; None without one."""
        try:
            around = self._predict().footprint(self._plan).around if self._unknown() is None else None
        except UserError:  # a model that has no trace: `compare` says so
            return None
        if around is None or not around.building.high:
            return None

        def said(what: str, peaks: list[int], phase: Phase) -> str:
            measured = max(high - low for high, low in zip(peaks, base, strict=True))
            return f"{what}: {_mib(measured)} MiB, predicted {_mib(phase.low)} to {_mib(phase.high)}"

        parts = [said("building the model", building, around.building)]
        parts += [said("writing it", writing, around.writing)] if writing is not None else []
        return "; ".join(parts)

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


def _machine(topology: Topology) -> Machine:
    host = topology.host_memory_bytes // topology.local_world_size
    device = topology.device_memory_bytes
    rates = measured(topology.local_world_size, accelerator=device is not None)
    ranks, nodes = topology.world_size, topology.nodes
    return Machine("this machine", ranks, device is not None, device or host, host, nodes, rates)


def as_dict(footprint: Footprint) -> dict[str, Any]:
    """For the summary, and for `plan.json`."""
    around = footprint.around
    return {
        "low": footprint.low,
        "middle": footprint.middle,
        "high": footprint.high,
        "tensors": footprint.tensors,
        "moment": footprint.moment,
        "by_kind": dict(footprint.bytes),
        "host": footprint.on_host,
        "libraries": footprint.libraries,
        "surely": footprint.surely,
        "highest": footprint.highest,
        "where": footprint.where,
        "around": asdict(around) if around is not None else None,
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
