"""The batch triangle: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."""

from collections.abc import Iterator
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, described, is_number

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def lint_batch(values: dict[str, Any], file: str, ranks: int | None, ranks_from: str = "") -> Iterator[Finding]:
    """Findings on the batch sizes of a ds_config. `ranks` is None where nothing says it; `ranks_from` is what does."""
    given = {key: values[key] for key in (TOTAL, MICRO, STEPS) if values.get(key) is not None}
    wrong = [finding for key, value in given.items() for finding in _value(key, value, file)]
    yield from wrong
    if TOTAL not in given and MICRO not in given:
        yield Finding(
            "error",
            file,
            MICRO,
            f"neither {MICRO} nor {TOTAL} is given, and DeepSpeed needs one",
            f'give "{MICRO}": sequences per forward pass on each rank',
        )
    elif not wrong and AUTO not in given.values():
        yield from _product(given, file, ranks, ranks_from)


def _value(key: str, value: Any, file: str) -> Iterator[Finding]:
    if value == AUTO:
        return
    if isinstance(value, str):
        number = value.strip().removeprefix("-").isdigit()
        fix = f"write {value.strip()} without quotes" if number else "write a number"
        yield Finding("error", file, key, f"{described(value)} is not a number, and DeepSpeed computes with it", fix)
    elif not is_number(value) or value != int(value):
        yield Finding("error", file, key, f"expected an integer, got {described(value)}")
    elif value <= 0:
        yield Finding("error", file, key, f"must be at least 1, is {value}")


def _product(given: dict[str, Any], file: str, ranks: int | None, ranks_from: str) -> Iterator[Finding]:
    total, micro, steps = (int(given[key]) if key in given else None for key in (TOTAL, MICRO, STEPS))
    if total is None:
        assert micro is not None
        yield _note(file, micro, steps or 1, ranks)
        return
    # What is not given is computed by DeepSpeed, which fails if the product is another then.
    parts = [f"{key} {given[key]}" for key in (MICRO, STEPS) if key in given]
    parts += [_ranks(ranks, ranks_from)] if ranks is not None else []
    unit = (micro or 1) * (steps or 1) * (ranks or 1)
    words = " x ".join(parts) + (f" = {unit}" if len(parts) > 1 else "")
    complete = micro is not None and steps is not None
    if complete and ranks is not None and total != unit:
        yield Finding("error", file, TOTAL, f"{total} is not {words}", f"set {TOTAL} to {unit}, or leave it out")
    elif total % unit:
        nearest = max(unit, round(total / unit) * unit)
        fix = f"set {TOTAL} to {nearest}, or give {MICRO} and {STEPS} instead"
        yield Finding("error", file, TOTAL, f"{total} is not a multiple of {words}", fix)
    elif ranks is not None:
        yield _note(file, micro or total // unit, (steps or 1) if micro is None else (steps or total // unit), ranks)
    elif complete:
        only = f"{micro} x {steps} x ranks is {total} at {total // unit} ranks and at no other number"
        yield Finding("note", file, TOTAL, only)
    else:
        yield Finding(
            "note", file, TOTAL, f"a step is {total} sequences; what each rank does of them follows from that"
        )


def _ranks(ranks: int, ranks_from: str = "") -> str:
    said = f" ({ranks_from})" if ranks_from else ""
    return f"{ranks} rank{'' if ranks == 1 else 's'}{said}"


def _note(file: str, micro: int, steps: int, ranks: int | None) -> Finding:
    sequences = f"{micro} x accumulation {steps}"
    if ranks is None:
        return Finding("note", file, MICRO, f"a step is micro-batch {sequences} x ranks sequences")
    total = micro * steps * ranks
    return Finding("note", file, MICRO, f"a step is micro-batch {sequences} x {_ranks(ranks)} = {total} sequences")
