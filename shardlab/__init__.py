"""shardlab: train a model that does not fit, on the machines you have; then shrink it until it does."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.recipe import Recipe, load_recipe
    from shardlab.train.callbacks import Callback
    from shardlab.train.engine import Engine

__version__ = "0.1.0"
__all__ = ["Callback", "Engine", "Recipe", "__version__", "load_recipe"]

_HOMES = {
    "Callback": "shardlab.train.callbacks",
    "Engine": "shardlab.train.engine",
    "Recipe": "shardlab.recipe",
    "load_recipe": "shardlab.recipe",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import shardlab` alone stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
