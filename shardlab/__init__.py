"""shardlab: train a model that does not fit, on the machines you have; then shrink it until it does."""

__version__ = "0.1.0"
