"""From a recipe and what there is to a plan."""

from shardlab.planner.resolve import describe, resolve

__all__ = ["describe", "resolve"]
