"""A script of somebody's own, started by the files of `shardlab plan --emit DIR`: `… planned.py DIR OUTPUT [trainer]`.

Two steps on CPU ranks, with Accelerate or the HF Trainer; what it found out about its job goes into OUTPUT.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardlab.runtime.extensions import without_shm_comm

without_shm_comm()  # compiling it takes a minute, and only inference uses it
directory, output = Path(sys.argv[1]), Path(sys.argv[2])
arguments = json.loads((directory / "training_arguments.json").read_text())
zero = "deepspeed" in arguments
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 16))]


def by_trainer() -> tuple[int, list[float], Any]:
    if zero:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    own = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    filled = TrainingArguments(output_dir=str(output.parent / "trainer"), **arguments, **own)
    trainer = Trainer(model, filled, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return filled.world_size, losses, trainer.model_wrapped


def by_accelerate() -> tuple[int, list[float], Any]:
    own = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]} if zero else {"cpu": True}
    accelerator = Accelerator(**own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments["learning_rate"])
    loader = torch.utils.data.DataLoader(rows, batch_size=arguments["per_device_train_batch_size"])
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = wrapped(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.num_processes, losses[:2], wrapped


world_size, losses, wrapped = by_trainer() if sys.argv[3:] == ["trainer"] else by_accelerate()
if int(os.environ["RANK"]) == 0:
    stage = wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else None
    found = {"world_size": world_size, "losses": losses, "stage": stage, "wrapped": type(wrapped).__name__}
    if stage is not None:
        found["micro_batch"] = wrapped.train_micro_batch_size_per_gpu()
    output.write_text(json.dumps(found))
