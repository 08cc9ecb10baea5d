"""The contestants of `stream.py`: each a few steps of one model in this process, and what they took."""

import contextlib
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY, WARM_STEPS = 16384, 2  # the first step makes optimizer state, the second is the first with an update


@dataclass(frozen=True)
class Contestant:
    """One model trained one way. `tokens` are a step's, in rows of `sequence`; `width` is the hidden size.

    `kind`: "stream" within `limit`, "memory" (ours, without a limit) or "deepspeed". `overrides` are of the recipe.
    """

    blocks: int
    tokens: int
    limit: str
    steps: int
    threads: int
    width: int = 1536
    sequence: int = 512
    kind: str = "stream"
    recompute: str = "none"
    directory: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """The model's, heads of 64."""
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": -(-self.width * 8 // 3 // 256) * 256,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.width // 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        }

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.tokens // self.sequence

    def recipe(self) -> Path:
        """Ours, written beside the model's files."""
        config = Path(self.directory) / "config.json"
        config.write_text(json.dumps(self.config))
        stream = self.kind == "stream"
        own = {"memory_limit": self.limit} if stream else {"recompute": self.recompute}
        recipe = {
            "model": {"config": str(config)},
            "data": {"source": "stdlib", "tokenizer": "bpe-16k", "sequence_length": self.sequence},
            "train": {
                "precision": "bf16",
                "global_batch_size": self.rows,
                "steps": 1000,
                "optimizer": {"lr": 1e-4},
            },
            "checkpoint": {"every": None},
            "shard": {"backend": "stream" if stream else "ddp", "micro_batch": 1, **own},
        }
        file = config.with_name("recipe.yaml")
        file.write_text(json.dumps(recipe))
        return file


def measure(one: Contestant) -> dict[str, Any]:
    """Seconds and loss of each timed step, seconds waited, bytes moved in a step, the process's peak of memory."""
    import torch

    torch.set_num_threads(one.threads)
    found = _deepspeed(one) if one.kind == "deepspeed" else _ours(one)
    config = one.config
    width, inner = config["hidden_size"], config["intermediate_size"]
    products = one.blocks * (4 * width**2 + 3 * width * inner) + VOCABULARY * width
    attention = one.blocks * width * one.sequence  # causal: half of the products of queries, keys and values
    return {**found, "operations": 6.0 * (products + attention) * one.tokens}


def _ours(one: Contestant) -> dict[str, Any]:
    from shardlab.data import prepare
    from shardlab.recipe import load_recipe
    from shardlab.train.engine import Engine
    from shardlab.train.foresight import Foresight
    from shardlab.train.run import build_from_recipe

    recipe = load_recipe(one.recipe(), one.overrides)
    run = Path(one.directory) / "run"
    with Engine.from_recipe(recipe, output=run) as engine:
        data = prepare(recipe.data)
        model, weights = build_from_recipe(engine, data)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert data.tokenizer is not None
        foresight = Foresight(recipe, engine.plan, engine.topology, len(data.tokenizer))
        engine.plan = foresight.fit(model, run, run / "checkpoints")
        engine.setup(model, weights, recipe.train.optimizer, data.tokenizer, packed=True)
        del model, weights
        plan = engine.plan
        windows = data.windows(
            global_batch_size=plan.global_batch_size, micro_batch=plan.micro_batch, rank=0, world_size=1, seed=0,
            steps=WARM_STEPS + one.steps,
        )  # fmt: skip
        results = []
        for number, window in enumerate(windows):
            if number == WARM_STEPS:
                engine.meter.reset()
                before = _moved(engine)
            results.append(engine.run(window))
        after = _moved(engine)
        waiting, read, written = (b - a for a, b in zip(before, after, strict=True))
        return {
            "parameters": parameters,
            "seconds": [result.seconds for result in results[WARM_STEPS:]],
            "losses": [result.loss for result in results],
            "waiting": waiting,
            "read": read / one.steps,
            "written": written / one.steps,
            "peak": engine.meter.peak_bytes(),
        }


def _moved(engine: Any) -> tuple[float, int, int]:
    """(seconds waited, bytes read, bytes written) so far; nothing of a backend that has no files."""
    traffic = getattr(engine.backend, "traffic", None)
    return (traffic.waited_seconds, traffic.read, traffic.written) if traffic is not None else (0.0, 0, 0)


def why_not_deepspeed() -> str | None:
    """Why its NVMe offload can't run here; None where it can."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints log lines
        from deepspeed.ops.op_builder import AsyncIOBuilder

        able = AsyncIOBuilder().is_compatible(verbose=False)
    if not able:
        return "DeepSpeed's async_io can't be built: libaio's headers (libaio-dev) are missing"
    return None


def _deepspeed(one: Contestant) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer on NVMe, as its documentation has it; buffers sized to the model."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardlab.data import prepare
    from shardlab.recipe import load_recipe
    from shardlab.topology import Topology
    from shardlab.train.meter import MemoryMeter

    meter = MemoryMeter(Topology.detect(1))
    data = prepare(load_recipe(one.recipe()).data)
    deepspeed.init_distributed("gloo")
    largest = max(VOCABULARY * one.width, one.config["intermediate_size"] * one.width)
    disk = {"device": "nvme", "nvme_path": one.directory, "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": one.rows,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": disk,
            "offload_param": {**disk, "buffer_size": largest + 1024, "buffer_count": 5},
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": largest,
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**one.config), dtype=torch.bfloat16)
    parameters = sum(parameter.ds_numel for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    windows = data.windows(
        global_batch_size=one.rows, micro_batch=1, rank=0, world_size=1, seed=0, steps=WARM_STEPS + one.steps
    )
    seconds: list[float] = []
    losses = []
    for window in windows:
        if len(seconds) == WARM_STEPS:
            meter.reset()
        took, loss = _deepspeed_step(engine, window)
        seconds.append(took)
        losses.append(loss)
    return {"parameters": parameters, "seconds": seconds[WARM_STEPS:], "losses": losses, "waiting": 0.0, "read": 0,
            "written": 0, "peak": meter.peak_bytes()}  # fmt: skip


def _deepspeed_step(engine: Any, window: Any) -> tuple[float, float]:
    started, total = time.perf_counter(), 0.0
    for batch in window.micro_batches:
        tensors = batch.tensors
        loss = engine(
            input_ids=tensors["input_ids"], position_ids=tensors["position_ids"], labels=tensors["input_ids"],
            shift_labels=tensors["targets"], use_cache=False,
        ).loss  # fmt: skip
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return time.perf_counter() - started, total / len(window.micro_batches)
