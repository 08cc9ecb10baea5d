"""A model directory in transformers, token by token, as the runtimes of exported files are driven."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardlab.export.onnx_graph import cache_argument


class HfModel:
    """One loaded model on the CPU, and what it remembers of the tokens that it was given.

    Weights are in the dtype that the directory says; quantized ones are unpacked as transformers does.
    """

    def __init__(self, directory: Path):
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.forget()

    @property
    def tokens(self) -> int:
        """For which there are logits."""
        return int(self._model.config.vocab_size)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """After each of `tokens`, with nothing remembered before: (len(tokens), vocabulary)."""
        self.forget()
        return self._forward(tokens, last=0)

    def extend(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, which follow the `position` tokens that are remembered."""
        assert position == self._cache.get_seq_length()
        return self._forward(tokens, last=1)[-1]

    def forget(self) -> None:
        """Begin anew."""
        from transformers import DynamicCache

        self._cache: Any = DynamicCache()

    def close(self) -> None:
        """Give the memory back."""
        self.forget()
        del self._model

    def _forward(self, tokens: Sequence[int], *, last: int) -> NDArray[np.float32]:
        """`last`: of so many tokens at the end, 0 of all."""
        given = torch.tensor([list(tokens)])
        with torch.inference_mode():
            out = self._model(
                input_ids=given, use_cache=True, logits_to_keep=last, **cache_argument(self._model, self._cache)
            )
        found: NDArray[np.float32] = out.logits[0].float().numpy()
        return found
