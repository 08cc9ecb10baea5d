"""Which plans can run compiled blocks."""

_BACKENDS = {
    "zero3": "DeepSpeed gathers weights in the middle of a block",
    "stream": "its blocks' weights come and go while a step runs",
}


def uncompilable(backend: str, recompute: str, activations: str) -> str | None:
    """What of these keeps blocks from being compiled, and why, as "setting value: reason"."""
    if backend in _BACKENDS:
        return f"backend {backend}: {_BACKENDS[backend]}"
    if recompute == "selective":
        return "recompute selective: it chooses by operator, of which compiled code has none"
    if activations != "none":
        return f"offload.activations {activations}: compiled code saves tensors of its own choice"
    return None
