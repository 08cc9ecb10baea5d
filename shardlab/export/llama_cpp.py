"""A GGUF file in llama.cpp, through the wheel `cyllama`."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.export.source import require

_F32 = 0  # ggml's number, of the cache's types
_NO_FLASH = 0


class LlamaCpp:
    """One open file. `exact` computes attention from an fp32 cache, for comparisons; otherwise as llama.cpp likes it.

    Raises UserError without cyllama, ValueError for a file that llama.cpp does not load.
    """

    def __init__(self, path: Path, *, context: int, exact: bool = False, threads: int | None = None):
        self._library: Any = require("cyllama.llama.llama_cpp")
        self._library.set_log_callback(_silent)
        parameters = self._library.LlamaModelParams()
        parameters.n_gpu_layers = 0
        self._model = _model_class(self._library)(str(path), parameters)
        self._vocabulary = self._model.get_vocab()
        self._context_tokens = context
        settings = self._library.LlamaContextParams()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        if threads is not None:
            settings.n_threads = settings.n_threads_batch = threads
        if exact:
            settings.type_k = settings.type_v = _F32
            settings.flash_attn_type = _NO_FLASH
        self._context = self._library.LlamaContext(self._model, settings)

    @property
    def tokens(self) -> int:
        """In the vocabulary."""
        return int(self._vocabulary.n_vocab)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """After each of `tokens`, from an empty cache: (len(tokens), vocabulary)."""
        self.forget()
        self._decode(tokens, 0, every=True)
        rows = [np.asarray(self._context.get_logits_ith(i), dtype=np.float32) for i in range(len(tokens))]
        return np.stack(rows)

    def extend(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, which follow the `position` tokens that the cache holds."""
        self._decode(tokens, position, every=False)
        return np.asarray(self._context.get_logits_ith(len(tokens) - 1), dtype=np.float32)

    def forget(self) -> None:
        """Empty the cache."""
        self._context.kv_cache_clear()

    def tokenize(self, text: str) -> list[int]:
        """`text` as its tokens, none added."""
        return list(self._vocabulary.tokenize(text, False, False))

    def close(self) -> None:
        """Give the memory back."""
        self._context.close()
        self._model.close()

    def _decode(self, tokens: Sequence[int], position: int, *, every: bool) -> None:
        batch = self._library.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        with contextlib.closing(batch):
            for i, token in enumerate(tokens):
                batch.add(int(token), position + i, [0], every or i == len(tokens) - 1)
            self._context.decode(batch)


def _model_class(library: Any) -> Any:
    """cyllama 0.2.18's model lacks the number of tokens that its context asks it for when it gives logits."""
    return type("Model", (library.LlamaModel,), {"n_vocab": property(lambda self: self.get_vocab().n_vocab)})


def _silent(level: int, text: str) -> None:
    del level, text
