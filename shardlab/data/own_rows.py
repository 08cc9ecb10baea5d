"""Rows that a user's own function brings, for models that are not language models."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.data.report import DataReport
from shardlab.data.windows import Rows, WindowLoader
from shardlab.errors import UserError


@dataclass(frozen=True)
class OwnData:
    """What a run needs of `data.PreparedData`, for rows without text: no tokenizer, no tokens to count beforehand."""

    train: Rows
    evaluation: Rows | None
    tokenizer: None = None

    @property
    def report(self) -> DataReport:
        """Nothing was left out, as far as is known here."""
        return DataReport.of((), ())

    def size(self) -> str:
        """How much there is, for people."""
        return f"{len(self.train):,} rows"

    def windows(self, **layout: int) -> WindowLoader:
        """See `PreparedData.windows`."""
        return WindowLoader(self.train, **layout)


def own_rows(builder: str) -> OwnData:
    """The rows that "package.module:function" returns: (training, evaluation or None). Raises UserError for others."""
    module_name, _, function = builder.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own module lies beside the recipe
    try:
        made: Any = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError) as error:
        raise UserError(f"data.builder: {builder} can't be imported: {error}") from error
    if not isinstance(made, Sequence) or len(made) != 2 or not hasattr(made[0], "batch"):
        raise UserError(f"data.builder: {builder} must return (training rows, evaluation rows or None)")
    training, evaluation = made
    return OwnData(training, evaluation)
