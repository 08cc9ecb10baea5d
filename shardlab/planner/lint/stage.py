"""Keys that do nothing at the stage, or that it contradicts."""

from collections.abc import Iterator
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, Severity, is_number, section, stage_of
from shardlab.planner.lint.tables import dead_keys, stages_of

_ZERO = "zero_optimization"
# Said where the offload is checked.
_ELSEWHERE = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param")


def lint_stage(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """Findings on the stage of a ds_config and the keys that go with it."""
    zero, stage = section(values, _ZERO), stage_of(values)
    if "stage" not in zero:
        severity: Severity = "warning" if zero else "note"
        message = "not given: stage 0, which shards nothing"
        yield Finding(severity, file, f"{_ZERO}.stage", message, "write 1, 2 or 3")
    for key in dead_keys({**zero, "stage": stage}):
        if key in _ELSEWHERE or zero[key] == AUTO:
            continue
        alive = stages_of(key)
        where = "at any stage" if not alive else f"at stage {stage} (only at {_listed(alive)})"
        yield Finding("warning" if len(alive) == 1 else "note", file, f"{_ZERO}.{key}", f"does nothing {where}")
    bucket = zero.get("allgather_bucket_size")
    if stage in (1, 2) and is_number(bucket) and bucket % 2:
        key = f"{_ZERO}.allgather_bucket_size"
        yield Finding("error", file, key, f"{bucket} is odd, which DeepSpeed refuses", f"write {bucket + 1}")
    if stage == 3 and str(values.get("gradient_allreduce_op", "mean")).lower() == "sum":
        yield Finding("error", file, "gradient_allreduce_op", "DeepSpeed refuses sum at stage 3", "write mean")
    if stage not in (1, 2) and zero.get("compute_grad_norm") is False:
        yield Finding("error", file, f"{_ZERO}.compute_grad_norm", f"DeepSpeed refuses false at stage {stage}")
    if str(section(values, "optimizer").get("type")).lower() == "adam":
        decoupled = section(values, "optimizer", "params").get("adam_w_mode", True)
        if decoupled:
            message = "Adam is AdamW in DeepSpeed: weight decay is decoupled"
            yield Finding("note", file, "optimizer.type", message, "write AdamW, or params.adam_w_mode false")


def _listed(stages: tuple[int, ...]) -> str:
    return " and ".join(str(stage) for stage in stages)
