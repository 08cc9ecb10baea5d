"""A training loop as people write it without shardlab, which measures its own peak of memory.

Run by `plan_accuracy.py`, and by a test: `python plain_loop.py SETTINGS_JSON OUTPUT_JSON`, or under torchrun. The loop
is Accelerate's: `model(**batch)` with labels, so whole logits and the model's own loss; `torch.optim.AdamW` as it
comes; gradients per micro-batch; malloc's defaults.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 4


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _accelerator(settings: dict[str, Any]) -> Accelerator:
    config, accumulation = settings.get("ds_config"), settings["accumulation"]
    if config is None:
        mixed = "bf16" if settings["precision"] == "bf16" and settings["loop"] == "hf" else "no"
        return Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulation)
    # What DeepSpeed and Accelerate import while they prepare and in the first step is the libraries', not the model's:
    # 41 MiB and 48.
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    from shardlab.runtime.extensions import without_shm_comm

    without_shm_comm()  # compiling it takes a minute, and only inference uses it
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    config = AutoConfig.for_model(**settings["model"])
    # What it imports is the libraries', not the model's. Before DeepSpeed is there: under ZeRO-3 transformers gives
    # weights their values in another way, which fails on the meta device.
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)
    accelerator = _accelerator(settings)
    now = _memory()
    base = now["RssAnon"] + now["RssShmem"]
    torch.manual_seed(0)
    pure = settings["precision"] == "bf16" and settings["loop"] == "hf-bf16"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if pure else torch.float32)
    if settings["recompute"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length, rows = settings["sequence_length"], settings["micro_batch"]
    count = STEPS * settings["accumulation"] * rows * accelerator.num_processes
    tokens = torch.randint(0, config.vocab_size, (count, length))
    examples: Any = [{"input_ids": row, "labels": row} for row in tokens]  # a list is a dataset, if not by type
    loader: Any = DataLoader(examples, batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for step, batch in enumerate(loader):
        if step == 2 * settings["accumulation"]:  # moments are there
            Path("/proc/self/clear_refs").write_text("5")
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    now = _memory()
    peak = now["VmHWM"] - now["RssFile"] - base
    peaks = accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()
    if accelerator.is_main_process:
        result = {"peaks": peaks, "base": base, "world_size": accelerator.num_processes, "losses": losses}
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
