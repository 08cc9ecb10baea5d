"""An exported ONNX model in onnxruntime, on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.export.source import require

FILE = "model.onnx"  # in the exported directory


class OnnxModel:
    """One loaded model, and what it remembers of the tokens that it was given.

    Raises UserError without onnxruntime.
    """

    def __init__(self, path: Path, *, threads: int | None = None):
        """`path`: the directory, or the file itself."""
        library = self._library = require("onnxruntime")
        options = library.SessionOptions()
        options.log_severity_level = 3  # it warns of each constant that it folds
        if threads is not None:
            options.intra_op_num_threads = options.inter_op_num_threads = threads
        file = path / FILE if path.is_dir() else path
        self._session = library.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._states = [i for i in self._session.get_inputs() if i.name.startswith("past_key_values.")]
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._past: list[Any] | None = None  # nothing is remembered yet

    @property
    def tokens(self) -> int:
        """For which there are logits."""
        return int(self._session.get_outputs()[0].shape[-1])

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """After each of `tokens`, with nothing remembered before: (len(tokens), vocabulary)."""
        self.forget()
        given = np.asarray([tokens], dtype=np.int64)
        return self.forward(given, np.ones_like(given))[0]

    def extend(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, which follow the `position` tokens that are remembered."""
        given = np.asarray([tokens], dtype=np.int64)
        return self.forward(given, np.ones((1, position + len(tokens)), dtype=np.int64))[0, -1]

    def forward(self, tokens: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (batch, new tokens, vocabulary) of `tokens` (batch, new tokens), and remember them.

        `mask` (batch, remembered and new tokens) has 0 where padding is.
        """
        if self._past is None:
            self._past = self._nothing(len(tokens))
        positions = np.maximum(mask.cumsum(-1) - 1, 0)[:, -tokens.shape[1] :]
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": np.ascontiguousarray(positions)}
        feed = {name: self._library.OrtValue.ortvalue_from_numpy(value) for name, value in given.items()}
        past = {state.name: value for state, value in zip(self._states, self._past, strict=True)}
        logits, *self._past = self._session.run_with_ort_values(self._outputs, feed | past)
        found: NDArray[np.float32] = logits.numpy()
        return found

    def forget(self) -> None:
        """Begin anew."""
        self._past = None

    def close(self) -> None:
        """Give the memory back."""
        self.forget()
        del self._session

    def _nothing(self, batch: int) -> list[Any]:
        shapes = [(batch, state.shape[1], 0, state.shape[3]) for state in self._states]
        return [self._library.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.float32)) for shape in shapes]
