"""The recipe's `checkpoint`: when training state goes to disk, and what of it stays there."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from shardlab.recipe.sections.base import Section


class CheckpointSection(Section):
    """Training state on disk, to go on from on any backend at any number of ranks."""

    every: PositiveInt | None = 100
    """Steps between checkpoints; null saves only when the run is stopped."""
    keep: PositiveInt = 2
    """The newest so many are kept, and the best by evaluation besides."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory."""
    grace_seconds: PositiveFloat = 300.0
    """After a signal to the launcher, how long the ranks may take to save before they are ended."""
    on_failure: Literal["stop", "continue"] = "stop"
    """A save that fails, on a full disk say, ends the run; or it goes on, and fails at its end."""
