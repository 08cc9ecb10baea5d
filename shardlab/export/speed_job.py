"""`python -m shardlab.export.speed_job ARTIFACT CONFIG`: what `speed.measure_speed` runs."""

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from shardlab.export.artifact import Runtime, artifact_bytes, kind_of, open_runtime
from shardlab.export.source import require
from shardlab.export.speed import Speed, SpeedConfig, announce


def main() -> None:
    """Load, warm up, time, say."""
    path, config = Path(sys.argv[1]), SpeedConfig(**json.loads(sys.argv[2]))
    threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    _import_libraries(path)
    gc.collect()
    before = psutil.Process().memory_info().rss
    _reset_peak()
    runtime = open_runtime(path, context=config.prompt_tokens + config.new_tokens, threads=threads)
    prompt = np.random.default_rng(0).integers(0, runtime.tokens, config.prompt_tokens).tolist()
    _once(runtime, prompt, config.new_tokens)
    times = [_once(runtime, prompt, config.new_tokens) for _ in range(config.repeats)]
    prefill, decode = (statistics.median(each) for each in zip(*times, strict=True))
    kind = kind_of(path)
    speed = Speed(
        runtime=f"{kind} {runtime.dtype}" if hasattr(runtime, "dtype") else kind,
        prefill_tokens_per_second=config.prompt_tokens / prefill,
        decode_tokens_per_second=config.new_tokens / decode,
        peak_bytes=_peak_bytes() - before,
        file_bytes=artifact_bytes(path),
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.new_tokens,
        repeats=config.repeats,
        threads=threads,
        load=load,
    )
    print(announce(speed), flush=True)


def _once(runtime: Runtime, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds of the prompt, and of the likeliest tokens after it, one by one."""
    runtime.forget()
    started = time.perf_counter()
    logits = runtime.extend(prompt, 0)
    middle = time.perf_counter()
    for place in range(new_tokens):
        logits = runtime.extend([int(logits.argmax())], len(prompt) + place)
    return middle - started, time.perf_counter() - middle


def _import_libraries(path: Path) -> None:
    """What the runtime takes is not the model's."""
    kind = kind_of(path)
    if kind == "onnx":
        require("onnxruntime")
    elif kind == "gguf":
        require("cyllama.llama.llama_cpp")
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SMALLEST))


_SMALLEST = {
    "vocab_size": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def _reset_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def _peak_bytes() -> int:
    """Resident, mapped files too: weights may lie in them."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


if __name__ == "__main__":
    main()
