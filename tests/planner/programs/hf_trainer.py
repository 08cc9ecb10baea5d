"""Two steps of the HF Trainer with a ds_config, on CPU ranks: `torchrun … hf_trainer.py DS_CONFIG OUTPUT`.

On a CPU transformers does not tell DeepSpeed of gloo, and each rank takes itself for the only one: so the state is made
before, as docs/doctor.md says. (With GPUs nothing of the kind is needed.)
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardlab.runtime.extensions import without_shm_comm

without_shm_comm()  # compiling it takes a minute, and only inference uses it
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
)
rows = [torch.randint(0, 64, (16,)) for _ in range(8)]
arguments = TrainingArguments(
    output_dir=str(Path(sys.argv[2]) / "trainer"),
    deepspeed=sys.argv[1],
    accelerator_config={"use_configured_state": True},
    per_device_train_batch_size=1,
    max_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
if arguments.process_index == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    done = {"losses": losses, "world_size": arguments.world_size, "stage": trainer.deepspeed.zero_optimization_stage()}
    (Path(sys.argv[2]) / "done.json").write_text(json.dumps(done))
