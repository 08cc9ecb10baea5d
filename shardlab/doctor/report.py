"""What the doctor prints, and the exit code that goes with it."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlab.doctor.files import lint_files, read_model
from shardlab.errors import ExitCode

Say = Callable[[str], None]


def examine(*, self_test: bool, as_json: bool, say: Say) -> int:
    """Check the machine: a line for each check, as it is done."""
    from shardlab.doctor.examine import examine as checks_of

    plain, checks = _plain(), []
    for check in checks_of(self_test=self_test):
        checks.append(check)
        if not as_json:
            say(check.line(plain))
    failed = any(check.status == "failed" for check in checks)
    if as_json:
        say(json.dumps({"ok": not failed, "checks": [check.as_json() for check in checks]}))
    return ExitCode.FAILURE if failed else ExitCode.DONE


def lint(
    ds_config: Path | None,
    accelerate: Path | None,
    model: Path | None,
    ranks: int | None,
    allow: Sequence[str],
    *,
    as_json: bool,
    say: Say,
) -> int:
    """Lint files: a line for each finding, errors first, then how many of each."""
    findings = lint_files(ds_config, accelerate, model, ranks=ranks, allow=allow)
    counts = Counter(finding.severity for finding in findings)
    if as_json:
        say(json.dumps({"errors": counts["error"], "findings": [finding.as_json() for finding in findings]}))
    else:
        for finding in findings:
            say(str(finding))
        say(", ".join(f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("error", "warning")))
    return ExitCode.USER if counts["error"] else ExitCode.DONE


def calibrate(*, as_json: bool, say: Say) -> int:
    """Measure the machine's speed for the planner, and keep it."""
    from shardlab.doctor.calibrate import calibrate as figures_of
    from shardlab.doctor.calibrate import lines

    found = figures_of()
    say(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))
    return ExitCode.DONE


def compare(a: Path, b: Path, model: Path | None, *, as_json: bool, say: Say) -> int:
    """Run both configurations, and say whether they compute the same."""
    from shardlab.doctor.parity import compare as verdict_on

    verdict = verdict_on(a, b, None if model is None else read_model(model)[0])
    say(json.dumps(verdict.as_json()) if as_json else "\n".join(verdict.lines()))
    return ExitCode.DONE if verdict.same else ExitCode.FAILURE


def _plain() -> bool:
    """Whether the output can't show marks."""
    try:
        "✓✗".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return True
    return False
