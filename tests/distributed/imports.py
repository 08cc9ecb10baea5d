"""What the ranks of a pool have in common: imported once, before they are forked. No thread is started by it."""
# ruff: noqa: F401

import gc

import deepspeed
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import transformers.masking_utils
import transformers.models.llama.modeling_llama

gc.collect()
gc.freeze()  # what is never looked at stays shared
