"""Checkpoints that are there whole or not at all, verify, and resume on any backend at any world size."""

from shardlab.checkpoint.asynchronous import AsyncSaver
from shardlab.checkpoint.listing import checkpoints, clean, find_newest, verify_together
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import DamagedError, Manifest
from shardlab.checkpoint.ranks import Alone, Ranks, join
from shardlab.checkpoint.save import Contents, Saver
from shardlab.checkpoint.verification import examine, read_manifest, verify

__all__ = [
    "Alone",
    "AsyncSaver",
    "CheckpointReader",
    "Contents",
    "DamagedError",
    "Manifest",
    "Ranks",
    "Saver",
    "checkpoints",
    "clean",
    "examine",
    "find_newest",
    "join",
    "read_manifest",
    "verify",
    "verify_together",
]
