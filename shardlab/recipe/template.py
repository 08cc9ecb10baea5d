"""The recipe that `shardlab init` writes."""

from pathlib import Path

from shardlab.errors import UserError

TEMPLATE = """\
# A shardlab recipe. Every key may be left out; the values here are the defaults.
model:
  preset: 6m                  # tiny, 6m, 150m; or one of these instead:
  # config: config.json       #   a Hugging Face config: that architecture, fresh weights
  # path: model-directory     #   a Hugging Face directory: architecture and weights
  # builder: package.module:function
  freeze: []                  # glob patterns of tensors that are not trained, e.g. model.embed_tokens.*
  attention: torch            # or tiles: on a CPU by tiles of queries, faster in bf16 or packed rows
  keep_masks: true            # what was pruned in `path` stays zero; false = trained again
  lora: null                  # e.g. {rank: 8, alpha: 16, targets: [q_proj, v_proj]}: adapters on `path`
data:
  source: stdlib              # the standard library's source text; or instead:
  # files: [texts/*.txt]      #   files or globs: text (a document each), .jsonl, .parquet, a saved dataset's directory
  # builder: package.module:function   # rows for a model that is no language model
  # evaluation_files: []      #   held out, instead of a fraction
  format: text                # or instruct (prompt, completion), chat (messages): only answers are learned
  columns: {text: text, prompt: prompt, completion: completion, messages: messages}   # of a record
  on_bad_record: error        # empty, not UTF-8, cut off, ...: or skip, replace
  max_record_bytes: 1000000   # a longer line or row is a bad record
  tokenizer: bpe-8k           # bytes, bpe-<N>k (trained on the text, cached), or a Hugging Face tokenizer directory
  sequence_length: 256        # tokens
  packing: true               # false: one document per row, padded
  streaming: false            # true: tokenise while training, keep no tokens on disk
  evaluation_fraction: 0.02   # held out
train:
  steps: 200                  # optimizer steps
  global_batch_size: 32       # sequences per optimizer step, over all ranks
  optimizer: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, groups: []}   # or sgd
  schedule: {name: cosine, warmup_steps: 20, final_fraction: 0.1}   # or linear, constant
  precision: bf16             # or fp32; masters, moments and accumulated gradients are fp32 in both
  clip_grad_norm: 1.0         # null = off
  compile: false              # torch.compile of each block: a minute or more at the start, faster steps after it
  qat: null                   # e.g. {scheme: int4, group_size: 32}: train with weights rounded as by `quantize`
  seed: 0
  stop_after: null            # end at that step with a checkpoint; --resume goes on
  on_nonfinite: stop          # or skip
  evaluate_every: null        # steps; null = at the end only
  trackers: []                # tensorboard, wandb, mlflow; their files lie in the run's tracking/
distill: null                 # learn from another model too; with its directory:
  # { teacher: model-directory, weight: 0.5, loss: forward_kl, temperature: 1.0, mixture: null,    # or jsd, ...
  #   hidden: null,                    # or {}: the hidden states of its blocks too; see docs/compress.md
  #   cache: null, cache_top_k: 64 }   # a directory to keep what the teacher says, so that it need not be in memory
shard:
  backend: auto               # ddp, zero1, zero2, zero3, fsdp, stream
  micro_batch: auto           # accumulation = global_batch_size / (micro_batch x ranks)
  world_size: null            # ranks expected
  replicas: 1                 # fsdp: groups of ranks that each shard the whole model (HSDP)
  reshard_after_forward: true
  shared_memory: true         # fsdp: CPU ranks of one host exchange through it, not through gloo
  offload:
    parameters: none          # or cpu
    optimizer: none           # or cpu
    activations: none         # or cpu (of an accelerator's), disk: what blocks save for their backward pass
    directory: null           # of activations on the disk; null = the run's own
    disk_limit: null          # of the same, e.g. 20GiB; null = what is free
  keep_freed: false           # ddp on a CPU: keep the memory that steps free: quicker, up to an eighth more of it
  recompute: none             # or selective (all but attention and every other product), full (whole blocks), auto
  memory_limit: null          # stream, recompute auto: what a process may take, e.g. 2GiB
  stream_directory: null      # stream: where the state's files lie; null = in the run's directory
  timeout_seconds: 600        # how long a rank may keep the others waiting
checkpoint:
  every: 100                  # steps; null = only when the run is stopped
  keep: 2                     # newest; the best by evaluation is kept besides
  asynchronous: true          # write in the background
  grace_seconds: 300          # to save in, after a signal to the launcher
  on_failure: stop            # of a save (disk full, say); or continue, and fail at the end
"""


def write_template(path: Path) -> None:
    """Write the template. Raises UserError if `path` exists."""
    if path.exists():
        raise UserError(f"{path} exists; it is not overwritten. Give another name")
    try:
        path.write_text(TEMPLATE, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error
