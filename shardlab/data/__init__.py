"""From text to windows: corpus, tokens, packed rows, and the batches of each optimizer step on each rank.

The order of the samples, the split and the windows are pure functions of the text, the seed and the global sample
position, so that every rank computes its own and a run resumes at any world size.
"""

from shardlab.data.document_rows import DocumentRows
from shardlab.data.order import permutation, rows_at
from shardlab.data.own_rows import OwnData
from shardlab.data.packing import PackedRows, pack
from shardlab.data.prepare import PreparedData, prepare, prepare_data
from shardlab.data.report import DataReport
from shardlab.data.streaming import StreamedText, StreamLoader
from shardlab.data.user_batches import shifted, windows_from_batches
from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.data.windows import AugmentedRows, Rows, WindowLoader, evaluation_batches

__all__ = [
    "IGNORED",
    "AugmentedRows",
    "DataReport",
    "DocumentRows",
    "MicroBatch",
    "OwnData",
    "PackedRows",
    "PreparedData",
    "Rows",
    "StreamLoader",
    "StreamedText",
    "Window",
    "WindowLoader",
    "evaluation_batches",
    "pack",
    "permutation",
    "prepare",
    "prepare_data",
    "rows_at",
    "shifted",
    "windows_from_batches",
]
