"""What the ranks of a pool have in common: imported once, before they are forked. No thread is started by it."""

import gc

import deepspeed  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import transformers.masking_utils
import transformers.models.llama.modeling_llama  # noqa: F401

gc.collect()
gc.freeze()  # what is never looked at stays shared
