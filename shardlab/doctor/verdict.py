"""Two runs' losses, gradient norms and weights -> whether they computed the same, or the first thing that differs."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.doctor.configuration import SCRIPTS_OWN, Configuration, Setting

Array = NDArray[Any]


@dataclass(frozen=True)
class Pass:
    """One way in which both sides are run."""

    name: str
    sides: tuple[Configuration, Configuration]


@dataclass(frozen=True)
class Tolerance:
    """Relative. `update`: of the L2 norm of how far a tensor moved in one step; `rounding`: of its own norm."""

    loss: float
    norm: float
    update: float
    rounding: float


# In fp32 only the order of sums differs; Adam divides small gradients by themselves, so it shows more.
FP32, FP32_ADAM = Tolerance(1e-5, 1e-4, 1e-3, 2**-22), Tolerance(1e-4, 1e-3, 1e-2, 2**-22)
_LIVE = 1e-5  # of the largest move in the model: what fp32 can tell from rounding
# With bf16 on both sides gradients agree to a few percent, and weights are seen as they compute, with 8 bits.
BF16, BF16_ADAM = Tolerance(2e-2, 2e-1, 3e-1, 2**-8), Tolerance(2e-2, 2e-1, 6e-1, 2**-8)


@dataclass(frozen=True)
class Verdict:
    """Whether the two sides compute the same; `what` says within which figures, or what differs first."""

    same: bool
    what: str
    sides: tuple[Configuration, Configuration]
    figures: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        a, b = self.sides
        lines = [f"{'the same' if self.same else 'NOT the same'}: {self.what}"]
        keys = dict.fromkeys([*a.settings, *b.settings])
        values = {key: {_said(a, key).value, _said(b, key).value} for key in keys}
        unlike = [key for key in keys if len(values[key]) > 1 and SCRIPTS_OWN not in values[key]]
        if not self.same:
            lines += [f"  {key}: {_said(a, key)} in {a.file}, {_said(b, key)} in {b.file}" for key in unlike]
        lines += [f"  note: {side.file}: {note}" for side in self.sides for note in side.notes]
        return lines

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return {
            "same": self.same,
            "what": self.what,
            "settings": {side.file: {k: str(v) for k, v in side.settings.items()} for side in self.sides},
            "notes": {side.file: list(side.notes) for side in self.sides},
            **self.figures,
        }


def _said(side: Configuration, key: str) -> Setting:
    return side.settings.get(key, Setting(SCRIPTS_OWN if key in ("optimizer", "schedule") else "not given"))


def judge(directory: Path, sides: tuple[Configuration, Configuration], passes: list[str], steps: int) -> Verdict:
    """The verdict on the files that the ranks have written."""
    worst = {"loss": 0.0, "gradient norm": 0.0, "update": 0.0}
    unseen = ""
    live: dict[str, Array] | None = None
    for number, name in enumerate(passes):
        with np.load(directory / f"{number}-0.npz") as a, np.load(directory / f"{number}-1.npz") as b:
            tolerance = _tolerance(sides, plain=number == 0)
            for step in range(steps):
                found = _first_difference(a, b, step, tolerance, live, worst)
                if found is not None:
                    return Verdict(False, f"step {step} with {name}: {found}", sides, {"step": step, "pass": name})
            if number == 0:
                unseen, live = _clipping_unseen(a, sides), _live_elements(a, steps)
    limits = ", ".join(f"{key} within {value:.1e}" for key, value in worst.items())
    runs = " and ".join(f"{steps} steps of {name}" for name in passes)
    return Verdict(True, f"{runs}, 2 ranks, a tiny model: {limits}{unseen}", sides, {"largest": worst})


def _tolerance(sides: tuple[Configuration, Configuration], *, plain: bool) -> Tolerance:
    if all(side.precision == "bf16" for side in sides):
        return BF16 if plain else BF16_ADAM
    return FP32 if plain else FP32_ADAM


def _live_elements(run: Any, steps: int) -> dict[str, Array]:
    """By name, the elements that have a gradient, by how they moved under plain SGD.

    Adam divides a gradient by itself, so one that is nothing but rounding (a key's bias under softmax) moves its
    element as far as any other, in either direction.
    """
    moved = {}
    for name in _names(run):
        states = [run[f"{at}/{name}"] for at in ("before", *range(steps))]
        moved[name] = np.max([np.abs(after - before) for before, after in pairwise(states)], axis=0)
    least = _LIVE * max(float(np.max(values)) for values in moved.values())
    return {name: values > least for name, values in moved.items()}


def _names(run: Any) -> list[str]:
    return [key.removeprefix("before/") for key in run.files if key.startswith("before/")]


def _first_difference(
    a: Any, b: Any, step: int, tolerance: Tolerance, live: dict[str, Array] | None, worst: dict[str, float]
) -> str | None:
    """What differs in this step: the loss before it, the gradient's norm, then how the tensors moved.

    `live`: the elements that count; None: all.
    """
    for key, file, limit in (("loss", "losses", tolerance.loss), ("gradient norm", "norms", tolerance.norm)):
        mine, theirs = float(a[file][step]), float(b[file][step])
        if key == "gradient norm" and (math.isnan(mine) or math.isnan(theirs)):
            continue  # DeepSpeed computes none without ZeRO
        apart = _relative(abs(mine - theirs), mine, theirs)
        worst[key] = max(worst[key], apart)
        if not apart <= limit:
            return f"the {key} is {mine:.6g} and {theirs:.6g}"
    before = "before" if step == 0 else str(step - 1)
    for name in _names(a):
        counts = 1.0 if live is None else live[name]
        moved_a = (a[f"{step}/{name}"] - a[f"{before}/{name}"]) * counts
        moved_b = (b[f"{step}/{name}"] - b[f"{before}/{name}"]) * counts
        sizes = float(np.linalg.norm(moved_a)), float(np.linalg.norm(moved_b))
        least = tolerance.rounding * float(np.linalg.norm(a[f"{step}/{name}"])) / tolerance.update
        apart = _relative(float(np.linalg.norm(moved_a - moved_b)), *sizes, least)
        worst["update"] = max(worst["update"], apart)
        if not apart <= tolerance.update:
            return (
                f"loss and gradient norm agree, but {name} moves by {sizes[0]:.4g} and {sizes[1]:.4g} "
                f"({apart:.0%} apart)"
            )
    return None


def _relative(apart: float, a: float, b: float, least: float = 1e-12) -> float:
    """`apart` as a share of the larger of the two, and of `least`."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf
    return apart / max(abs(a), abs(b), least)


def _clipping_unseen(run: Any, sides: tuple[Configuration, Configuration]) -> str:
    """A limit that the norms stayed below has not been compared."""
    limits = {side.clip_grad_norm for side in sides}
    above = float(np.nanmax(run["norms"])) if np.isfinite(run["norms"]).any() else math.inf
    hidden = [limit for limit in limits if limit is not None and limit >= above]
    if len(limits) == 1 or not hidden:
        return ""
    return f" (norms stayed below {above:.3g}, so the limits {_words(limits)} have not come into play)"


def _words(limits: set[float | None]) -> str:
    return " and ".join("off" if limit is None else f"{limit:g}" for limit in limits)
