"""What each "auto" would become, and those that nobody fills in.

"auto" is a word of accelerate and the HF Trainer. DeepSpeed does not know it: its models drop such a key and take their
default, everywhere else it stays a string (https://github.com/huggingface/transformers/issues/21342).
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, section, stage_of
from shardlab.planner.lint.keys import known_keys
from shardlab.planner.lint.sizes import hidden_size

Path = tuple[str, ...]

_ZERO = "zero_optimization"
# Filled in from the width of the model, as accelerate and the Trainer do.
FROM_WIDTH: dict[str, tuple[str, float, int]] = {  # key: (words, factor, power)
    "reduce_bucket_size": ("hidden_size x hidden_size", 1.0, 2),
    "stage3_prefetch_bucket_size": ("0.9 x hidden_size x hidden_size", 0.9, 2),
    "stage3_param_persistence_threshold": ("10 x hidden_size", 10.0, 1),
}
# Filled in from the program's arguments: those of the HF Trainer, which accelerate's own largely follow.
_FROM_ARGUMENTS: dict[Path, str] = {
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size (accelerate: the data loader's batch size)",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("train_batch_size",): "the micro-batch x gradient_accumulation_steps x ranks",
    ("gradient_clipping",): "max_grad_norm (1.0 unless set; accelerate: 1.0)",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "betas"): "adam_beta1 and adam_beta2",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_min_lr"): "0",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("scheduler", "params", "total_num_steps"): "the number of steps",
    ("fp16", "enabled"): "fp16 (accelerate: mixed_precision)",
    ("bf16", "enabled"): "bf16 (accelerate: mixed_precision)",
}
# Where "auto" is a value of DeepSpeed's own.
_MEANT = {
    ("data_types", "keep_in_fp32_modules"),
    ("pipeline", "stages"),
    (_ZERO, "zenflow", "select_strategy"),
    (_ZERO, "zenflow", "select_interval"),
    (_ZERO, "zenflow", "update_interval"),
}


def autos(values: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    """The path of every "auto" that somebody would have to fill in."""
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            yield from autos(value, here)
        elif value == AUTO and here not in _MEANT and here[0] != "expert_parallel":
            yield here


def lint_auto(values: dict[str, Any], file: str, model: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Findings on each "auto" of a ds_config. `model` is the model's config.json."""
    found = list(autos(values))
    by_width = [path for path in found if _counts(path, values)]
    width = None if model is None else hidden_size(model)
    if by_width and model is not None and width is None:
        names = ", ".join(".".join(path) for path in by_width)
        yield Finding(
            "error",
            file,
            names,
            "auto is computed from the model's width, and its config has none of hidden_size, hidden_sizes, "
            "text_config, decoder, d_model, n_embd",
            "write numbers: for a width h the usual ones are "
            + ", ".join(FROM_WIDTH[path[-1]][0] for path in by_width),
        )
    for path in found:
        if path in by_width:
            if model is None or width is not None:
                yield _from_width(path, file, width)
        elif path in _FROM_ARGUMENTS:
            message = f"auto: accelerate and the HF Trainer fill in {_FROM_ARGUMENTS[path]}"
            yield Finding("note", file, ".".join(path), message, "the deepspeed command does not: write a value for it")
        elif not (path[:1] == (_ZERO,) and path[-1] in FROM_WIDTH):
            yield _leftover(path, file)


def _counts(path: Path, values: Mapping[str, Any]) -> bool:
    """Whether this "auto" is filled in from the width; those of stage 3 only at that stage."""
    if path[:1] != (_ZERO,) or path[-1] not in FROM_WIDTH:
        return False
    return path[-1] == "reduce_bucket_size" or stage_of(dict(values)) == 3


def from_width(key: str, width: int) -> int:
    """What `auto` becomes for this key of zero_optimization and a model of this width."""
    _, factor, power = FROM_WIDTH[key]
    return int(factor * width**power)


def _from_width(path: Path, file: str, width: int | None) -> Finding:
    words = FROM_WIDTH[path[-1]][0]
    if width is None:
        message = f"auto: accelerate and the HF Trainer fill in {words}"
        return Finding("note", file, ".".join(path), message, "--model DIR shows the number")
    number = from_width(path[-1], width)
    return Finding("note", file, ".".join(path), f"auto becomes {number} ({words}, which is {width})")


def _leftover(path: Path, file: str) -> Finding:
    known = known_keys(path[:-1])
    default = known[path[-1]].default if isinstance(known, dict) and path[-1] in known else None
    if isinstance(known, dict):
        then = "DeepSpeed takes its default" + (f", {default}," if default is not None else "") + " in silence"
    else:
        then = "DeepSpeed gets the word itself"
    return Finding("error", file, ".".join(path), f"nothing fills in this auto: {then}", "write a value")


def resolve_auto(values: dict[str, Any], model: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """(a copy with the values that follow from the model's width, the paths of every "auto" that is left).

    At the stages where stage 3's own keys do nothing they are taken out.
    """
    resolved, width = deepcopy(values), hidden_size(model)
    zero = section(resolved, _ZERO)
    for key in FROM_WIDTH:
        if zero.get(key) != AUTO:
            continue
        if not _counts((_ZERO, key), values):
            del zero[key]
        elif width is not None:
            zero[key] = from_width(key, width)
    return resolved, list(autos(resolved))
