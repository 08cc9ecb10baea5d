"""What takes part in the benchmarks of time: an Accelerate loop, the HF Trainer, torch's FSDP2, and ours.

Each trains on the same work until it is ended. A script that has `--contestant` calls `take_part`. Each has the state
that its user would have: ours sets the allocator for itself, peers are left as they are. bf16: ours is a bf16 copy of
the weights, theirs is autocast.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turns import Turns, Work

ROWS = 64  # different rows of random tokens
LEARNING_RATE, WEIGHT_DECAY, BETAS, WARMUP = 1e-3, 0.1, (0.9, 0.95), 20
LOOP, TRAINER, OUR_RUN, OUR_LOOP = "Accelerate loop", "HF Trainer", "shardlab train", "shardlab Engine in a loop"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those by which a contestant's own process is started."""
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=lambda text: Work(**json.loads(text)), help=argparse.SUPPRESS)


def take_part(options: argparse.Namespace) -> int:
    """One process of a contestant: trains until it is ended."""
    turns = Turns(options.block, options.work)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(options.work.model))
        CONTESTANTS[options.contestant](turns, config)
    return 0


def token_rows(work: Work) -> Any:
    """Random tokens, (ROWS, sequence)."""
    import torch

    return torch.randint(work.model["vocab_size"], (ROWS, work.sequence), generator=torch.Generator().manual_seed(0))


def _examples(work: Work) -> Any:  # a list is a dataset, if not by type
    return [{"input_ids": row, "labels": row} for row in token_rows(work)]


def _model(config: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config.read_text())))


def _optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _again(loader: Sequence[Any] | Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def accelerate_loop(turns: Turns, config: Path, stage: int | None = None) -> None:
    """What Accelerate's documentation shows: prepare, accumulate, backward, clip, step. With ZeRO at a `stage`."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader

    work = turns.work
    accelerator = _accelerator(work, stage)
    model = _model(config)
    optimizer = _optimizer(model)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(_examples(work), batch_size=work.micro_batch), schedule
    )
    model.train()
    turns.begin()
    total = 0.0
    for batch in _again(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.detach() / work.accumulation
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.step_done(total)
            total = 0.0


def _accelerator(work: Work, stage: int | None) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DeepSpeedPlugin

    mixed = "bf16" if work.precision == "bf16" else "no"
    if stage is None:
        return Accelerator(cpu=not _on_gpu(), mixed_precision=mixed, gradient_accumulation_steps=work.accumulation)
    from shardlab.runtime.extensions import without_shm_comm

    without_shm_comm()  # compiling it takes a minute, and only inference uses it
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=work.accumulation, gradient_clipping=1.0, zero3_init_flag=False
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = work.micro_batch
    plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    return Accelerator(
        mixed_precision=mixed,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend=None if _on_gpu() else "gloo")],
    )


def torch_fsdp(turns: Turns, config: Path) -> None:
    """torch's `fully_shard` around each block and the model, by hand: on a CPU Accelerate turns FSDP into DDP."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    work = turns.work
    dist.init_process_group(None if _on_gpu() else "gloo")
    mesh = init_device_mesh("cuda" if _on_gpu() else "cpu", (work.ranks,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if work.precision == "bf16" else MixedPrecisionPolicy()
    model = _model(config)
    for block in [*model.model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = _optimizer(model)
    mine = token_rows(work)[dist.get_rank() :: work.ranks].split(work.micro_batch)
    turns.begin()
    batches = _again(mine)
    while True:
        total = 0.0
        for _ in range(work.accumulation):
            rows = next(batches)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss / work.accumulation
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.step_done(total)


def hf_trainer(turns: Turns, config: Path) -> None:
    """The Trainer with logging, saving and evaluation off."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            turns.begin()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            turns.step_done()

    work = turns.work
    arguments = TrainingArguments(
        output_dir=str(config.parent / "trainer"),
        use_cpu=not _on_gpu(),
        bf16=work.precision == "bf16",
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.accumulation,
        max_steps=1000,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend=None if _on_gpu() or work.ranks == 1 else "gloo",
    )
    Trainer(_model(config), arguments, train_dataset=_examples(work), callbacks=[TakeTurns()]).train()


def shardlab_train(turns: Turns, config: Path) -> None:
    """What `shardlab train` runs for each step: a window of packed rows, and the engine."""
    engine, loader = our_engine(turns.work, config)
    turns.begin()
    for window in loader:
        turns.step_done(engine.run(window).loss)


def our_engine(work: Work, config: Path) -> tuple[Any, Any]:
    """An engine that has its model, and the windows that it is to train on."""
    import numpy as np

    from shardlab.data import WindowLoader
    from shardlab.data.packing import PackedRows
    from shardlab.data.tokens import TokenStream
    from shardlab.model.build import build_model

    engine = _engine(work, config)
    recipe = engine.recipe
    stream = token_rows(work).flatten().numpy().astype(np.uint16)
    rows = PackedRows(TokenStream(stream, np.array([len(stream)])), sequence_length=work.sequence, eos=0)
    model, weights = build_model(recipe.model, vocabulary=1, eos_token_id=None, sequence_length=work.sequence, seed=0)
    engine.setup(model, weights, recipe.train.optimizer)
    loader = WindowLoader(
        rows,
        global_batch_size=work.rows,
        micro_batch=work.micro_batch,
        rank=engine.topology.rank,
        world_size=engine.topology.world_size,
        seed=0,
        steps=recipe.train.steps,
    )
    return engine, loader


def shardlab_loop(turns: Turns, config: Path) -> None:
    """A user's own loop with the engine, over the same DataLoader as the Accelerate loop's."""
    from torch.utils.data import DataLoader

    work = turns.work
    engine = _engine(work, config)
    model = _model(config)
    loader: Any = DataLoader(_examples(work), batch_size=work.micro_batch)
    _, _, windows = engine.prepare(model, _optimizer(model), _again(loader))
    turns.begin()
    for window in windows:
        turns.step_done(engine.step(window))


def _engine(work: Work, config: Path) -> Any:
    from shardlab.recipe import Recipe
    from shardlab.train.engine import Engine

    recipe = {
        "model": {"config": str(config), **work.ours},
        "data": {"sequence_length": work.sequence},
        "train": {
            "precision": work.precision,
            "global_batch_size": work.rows,
            "steps": 1000,
            "optimizer": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
            "schedule": {"name": "constant", "warmup_steps": WARMUP},
            **work.train,
        },
        "shard": {"backend": "ddp", "micro_batch": work.micro_batch, **work.shard},
    }
    return Engine.from_recipe(Recipe.from_dict(recipe))


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


CONTESTANTS: dict[str, Callable[[Turns, Path], None]] = {
    LOOP: accelerate_loop,
    TRAINER: hf_trainer,
    OUR_RUN: shardlab_train,
    OUR_LOOP: shardlab_loop,
    "torch fully_shard": torch_fsdp,
    "Accelerate ZeRO-2": partial(accelerate_loop, stage=2),
    "Accelerate ZeRO-3": partial(accelerate_loop, stage=3),
}
