"""`shardlab tune`: the plans that should be fastest, each for a few real steps, and the recipe with the one that was.

A trial is a job of our launcher's in a process of its own: whatever ends it (the kernel for want of memory, a rank that
raises, time) ends all its ranks, and nothing else. What fails once is not tried with a larger micro-batch.
"""

import json
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardlab.plan import Plan
from shardlab.planner.names import gib, name, over
from shardlab.planner.search import Candidate, Survey, nearest
from shardlab.planner.show import candidate_dict
from shardlab.recipe import Recipe, dump_recipe
from shardlab.runtime.job import Ended, RankJob

PER_KIND = 2  # measured plans that differ in nothing but the micro-batch: predictions of those are near each other
TRIES = 2  # for each that is to be measured: failures have a limit too
_MEMORY = re.compile(r"out of memory|OutOfMemory|can(no|')t allocate memory|MemoryError|bad_alloc", re.IGNORECASE)

Outcome = Literal["measured", "out of memory", "failed", "timed out", "not tried"]


@dataclass(frozen=True)
class Measured:
    """Of a step, by the slowest rank; the peak by the largest, above the libraries'."""

    seconds: float
    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True)
class Trial:
    """What became of a candidate; `reason` says why there is no measurement."""

    candidate: Candidate
    outcome: Outcome
    reason: str = ""
    measured: Measured | None = None

    @property
    def plan(self) -> Plan:
        """The candidate's."""
        return self.candidate.plan


Try = Callable[[Candidate], Trial]


def trials(found: Survey, attempt: Try, top: int) -> Iterator[Trial]:
    """The recipe's own plan, then those that fit, the best by prediction first, until `top` of them were measured.

    Of a kind (backend, offload, recompute) at most two are; one that failed is not tried again with as large a
    micro-batch or a larger one. Ends after 2 x `top` tries in any case.
    """
    failed: dict[Any, Trial] = {}  # by kind, the smallest micro-batch that did
    if found.own is not None:
        yield _own(found.own, attempt, failed)
    measured: Counter[Any] = Counter()
    tries = 0
    for candidate in found.fitting:
        if measured.total() == top or tries == TRIES * top:
            return
        if found.own is not None and _same(candidate.plan, found.own.plan):
            continue
        kind = _kind(candidate.plan)
        if kind in failed and candidate.plan.micro_batch >= failed[kind].plan.micro_batch:
            before = failed[kind]
            yield Trial(candidate, "not tried", f"{before.outcome} at micro-batch {before.plan.micro_batch}")
            continue
        if measured[kind] == PER_KIND:
            continue
        trial = attempt(candidate)
        tries += 1
        if trial.measured is not None:
            measured[kind] += 1
        else:
            failed[kind] = trial
        yield trial


def _own(own: Candidate, attempt: Try, failed: dict[Any, Trial]) -> Trial:
    """The recipe as it is: what the others have to beat."""
    if not own.fits:
        return Trial(own, "not tried", f"does not fit, {over(own.left_bytes)}, in the {own.footprint.where}")
    trial = attempt(own)
    if trial.measured is None:
        failed[_kind(own.plan)] = trial
    return trial


def _kind(plan: Plan) -> tuple[object, ...]:
    return plan.backend, plan.offload, plan.recompute, plan.recompute_fits, plan.replicas


def _same(a: Plan, b: Plan) -> bool:
    return _kind(a) == _kind(b) and a.micro_batch == b.micro_batch


def best(tried: Sequence[Trial]) -> Trial | None:
    """The one whose step took the least time; None where none was measured."""
    return min((t for t in tried if t.measured), key=lambda t: t.measured.seconds if t.measured else 0.0, default=None)


def nothing_ran(found: Survey, tried: Sequence[Trial]) -> str:
    """Why there is no best, in one line."""
    if not found.fitting:
        closest = nearest(found.candidates)
        return f"no plan fits here; the nearest is {name(closest.plan)}, {over(closest.left_bytes)}"
    outcomes = Counter(trial.outcome for trial in tried if trial.outcome != "not tried")
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    last = next(trial for trial in reversed(tried) if trial.outcome != "not tried")
    return f"none of the plans ran ({counted}); the last, {name(last.plan)}: {last.reason}"


def tried_on_ranks(recipe: Recipe, steps: int, timeout_seconds: float) -> Try:
    """Trials that are jobs of ranks on this host, each of `steps` optimizer steps."""

    def attempt(candidate: Candidate) -> Trial:
        with tempfile.TemporaryDirectory(prefix="shardlab-") as directory:
            own, figures = Path(directory) / "recipe.yaml", Path(directory) / "figures.json"
            own.write_text(dump_recipe(_quiet(with_plan(recipe, candidate.plan))), encoding="utf-8")
            arguments, ranks = [str(own), str(figures), str(steps)], candidate.plan.world_size
            module = "shardlab.train.tune_job"
            with RankJob(module, arguments, nproc=ranks, timeout_seconds=timeout_seconds) as job:
                ended = job.wait()
            if ended.done:
                return Trial(candidate, "measured", measured=Measured(**json.loads(figures.read_text())))
            return Trial(candidate, _outcome(ended), ended.cause if ended.code is not None else ended.message)

    return attempt


def _outcome(ended: Ended) -> Outcome:
    if ended.code is None:
        return "timed out"
    killed = ended.code == 128 + signal.SIGKILL
    return "out of memory" if killed or _MEMORY.search(ended.message) else "failed"


def with_plan(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe that resolves to `plan` on as many ranks; all that is learned stays."""
    values = recipe.model_dump(mode="json")
    offload = values["shard"]["offload"] if plan.offload.activations == "disk" else {}
    moved = {what: getattr(plan.offload, what) for what in ("parameters", "optimizer", "activations")}
    limited = plan.backend == "stream" or plan.memory_limit is not None
    values["shard"] |= {
        "backend": plan.backend,
        "micro_batch": plan.micro_batch,
        "replicas": plan.replicas,
        "reshard_after_forward": plan.reshard_after_forward,
        "offload": offload | moved,
        "recompute": "auto" if plan.recompute_fits else plan.recompute,
        "memory_limit": values["shard"]["memory_limit"] if limited else None,
    }
    return Recipe.from_dict(values)


def _quiet(recipe: Recipe) -> Recipe:
    """Trials are nothing to track."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"trackers": ()})})


def tuned(recipe: Recipe, tried: Sequence[Trial]) -> str:
    """The recipe with the best that was measured, which there is, as YAML; what was measured stands above it."""
    chosen = best(tried)
    assert chosen is not None
    lines = [f"# By shardlab tune on {chosen.plan.world_size} rank(s); all values, defaults too. Steps were measured:"]
    lines += [f"# {line(trial)}" for trial in tried]
    return "\n".join([*lines, dump_recipe(with_plan(recipe, chosen.plan))])


def line(trial: Trial) -> str:
    """One trial for people."""
    measured, cost = trial.measured, trial.candidate.cost
    predicted = f"{cost.seconds:.3g} s" if cost is not None else "no time"
    if measured is None:
        return f"{name(trial.plan)}: {trial.outcome}: {trial.reason}"
    return (
        f"{name(trial.plan)}: {measured.seconds:.3g} s a step (predicted {predicted}), "
        f"{measured.tokens_per_second:,.0f} tokens/s, peak {gib(measured.peak_bytes)} GiB above the libraries"
    )


def as_dict(tried: Sequence[Trial]) -> dict[str, Any]:
    """Everything, for `--json`: a trial is a candidate as `plan --json` has it, and what became of it."""
    chosen = best(tried)

    def one(trial: Trial) -> dict[str, Any]:
        measured = asdict(trial.measured) if trial.measured is not None else None
        return candidate_dict(trial.candidate) | {
            "outcome": trial.outcome,
            "reason": trial.reason or None,
            "measured": measured,
        }

    return {"trials": [one(trial) for trial in tried], "best": one(chosen) if chosen is not None else None}
