"""A user's own loop, as the README shows it: `five_lines.py RECIPE DIRECTORY`, alone or under any launcher.

Each process has batches of its own, and not as many as the others.
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab import Engine

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 64, (10, 12))
batches = [{"input_ids": tokens[i : i + 2], "labels": tokens[i : i + 2]} for i in range(2 * rank, 10, 2 * world)]

engine = Engine.from_recipe(sys.argv[1])
model, optimizer, loader = engine.prepare(model, optimizer, batches)
for window in loader:
    loss = engine.step(window)
    print(f"rank {rank} loss {loss:.6f}", flush=True)
engine.save(sys.argv[2])
