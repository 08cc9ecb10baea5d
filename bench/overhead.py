"""Step time of the engine beside a hand-written Accelerate loop and the Hugging Face Trainer.

The same model, data, batch, optimizer, clipping and precision; one process with two threads for each contestant. They
take turns: a few steps of one while the others sleep, then of the next, in an order that rotates. So what else the
machine does hits them alike, and a ratio is the median over rounds of (its time / the Accelerate loop's in that round).
CPU time is given beside it: of all threads, and hardly moved by other programs where a contestant has one thread.

Each contestant has its own process in the state that its user would have: ours sets the allocator for itself, peers
are left as they are (`--same-allocator` gives them our settings). bf16: ours is a bf16 copy of the weights, theirs is
autocast. The loss shows that loop and engine do the same work: from the same weights, over the same batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report, Target, say

MODELS: dict[str, dict[str, Any]] = {  # tied
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "6m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5, "vocab_size": 8192},
    "34m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 16384},
}
COMMON = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True}
SEQUENCE, MICRO_BATCH, ACCUMULATION = 256, 4, 2
ROWS, WARM_ROUNDS = 64, 2
LEARNING_RATE, WEIGHT_DECAY, BETAS, WARMUP = 1e-3, 0.1, (0.9, 0.95), 20
LOOP, TRAINER, OUR_RUN, OUR_LOOP = "Accelerate loop", "HF Trainer", "shardlab train", "shardlab Engine in a loop"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="6m,34m", help=f"separated by commas, of {', '.join(MODELS)}")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contestant that count")
    parser.add_argument("--block", type=int, default=2, help="optimizer steps in a turn")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant")
    parser.add_argument("--same-allocator", action="store_true", help="give the peers our allocator settings")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)  # its own process
    options = parser.parse_args()
    if options.contestant is not None:
        return take_part(options)
    report = Report(
        f"Step time beside Accelerate and the Trainer: sequence {SEQUENCE}, micro-batch {MICRO_BATCH}, "
        f"accumulation {ACCUMULATION}, {options.threads} threads, {options.rounds} turns of {options.block} steps",
        {
            "model": "",
            "precision": "",
            "contestant": "",
            "ms/step": ".1f",
            "tokens/s": ".0f",
            "to loop": ".3f",
            "CPU ms/step": ".1f",
            "CPU to loop": ".3f",
            "loss": ".5f",
        },
    )
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            add_case(report, model, precision, options)
    report.print(options.json)
    return 0


def add_case(report: Report, model: str, precision: str, options: argparse.Namespace) -> None:
    """Measure all contestants on one model in one precision."""
    say(f"{model} {precision} ...")
    rounds = alternate(model, precision, options)
    for name in CONTESTANTS:
        seconds = statistics.median(turn[name].seconds for turn in rounds)
        report.rows.append(
            {
                "model": model,
                "precision": precision,
                "contestant": name,
                "ms/step": seconds * 1e3,
                "tokens/s": SEQUENCE * MICRO_BATCH * ACCUMULATION / seconds,
                "to loop": ratio(rounds, name, LOOP),
                "CPU ms/step": statistics.median(turn[name].cpu_seconds for turn in rounds) * 1e3,
                "CPU to loop": statistics.median(turn[name].cpu_seconds / turn[LOOP].cpu_seconds for turn in rounds),
                "loss": rounds[-1][name].loss,
            }
        )
    report.targets += [
        Target(f"{model} {precision}, {OUR_RUN} / {LOOP}", ratio(rounds, OUR_RUN, LOOP), 1.03),
        Target(f"{model} {precision}, {OUR_RUN} / {TRAINER}", ratio(rounds, OUR_RUN, TRAINER), 1.0),
    ]


@dataclass(frozen=True)
class Turn:
    """A few steps of one contestant: wall and CPU seconds per step, and the last step's loss."""

    seconds: float
    cpu_seconds: float
    loss: float | None


def ratio(rounds: Sequence[Mapping[str, Turn]], name: str, other: str) -> float:
    """The median over rounds of (step time of `name` / of `other`)."""
    return statistics.median(turn[name].seconds / turn[other].seconds for turn in rounds)


def alternate(model: str, precision: str, options: argparse.Namespace) -> list[dict[str, Turn]]:
    """Let the contestants take turns; the rounds that count."""
    names = list(CONTESTANTS)
    rounds: list[dict[str, Turn]] = []
    processes = {name: _start(name, model, precision, options) for name in names}
    try:
        for process in processes.values():
            _answer(process)  # ready
        for number in range(WARM_ROUNDS + options.rounds):
            first = number % len(names)
            rounds.append({name: _take_turn(processes[name]) for name in names[first:] + names[:first]})
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return rounds[WARM_ROUNDS:]


def _start(name: str, model: str, precision: str, options: argparse.Namespace) -> "subprocess.Popen[str]":
    arguments = ["--contestant", name, "--models", model, "--precisions", precision, "--block", str(options.block)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if options.same_allocator:
        environment |= ALLOCATOR
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _take_turn(process: "subprocess.Popen[str]") -> Turn:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: "subprocess.Popen[str]") -> Turn:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a contestant ended early, code {process.wait()}")
    return Turn(**json.loads(line))


class Turns:
    """A contestant's side: times its own steps, and sleeps while others have their turn."""

    def __init__(self, block: int):
        self._block = block
        self._left = block
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints

    def begin(self) -> None:
        """Ready, before the first step."""
        self._wait(Turn(0.0, 0.0, None))

    def step_done(self, loss: Any = None) -> None:
        """To be called after each optimizer step."""
        self._left -= 1
        if self._left == 0:
            seconds, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
            self._wait(Turn(seconds / self._block, cpu / self._block, None if loss is None else float(loss)))

    def _wait(self, turn: Turn) -> None:
        print(json.dumps(vars(turn)), file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._left = self._block
        self._started, self._cpu_started = time.perf_counter(), time.process_time()


def take_part(options: argparse.Namespace) -> int:
    """One contestant's process: trains until it is ended."""
    turns = Turns(options.block)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(COMMON | MODELS[options.models]))
        CONTESTANTS[options.contestant](turns, config, options.precisions)
    return 0


def _rows(config: Path) -> Any:
    """Random tokens, (ROWS, SEQUENCE)."""
    import torch

    vocabulary = json.loads(config.read_text())["vocab_size"]
    return torch.randint(vocabulary, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))


def _examples(config: Path) -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": row} for row in _rows(config)]


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


def accelerate_loop(turns: Turns, config: Path, precision: str) -> None:
    """What Accelerate's documentation shows: prepare, accumulate, backward, clip, step."""
    from accelerate import Accelerator
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=not _on_gpu(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_steps=ACCUMULATION,
    )
    model = _model(config)
    optimizer = _optimizer(model)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(_examples(config), batch_size=MICRO_BATCH), schedule
    )
    model.train()
    turns.begin()
    total = 0.0
    for batch in _again(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.detach() / ACCUMULATION
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.step_done(total)
            total = 0.0


def hf_trainer(turns: Turns, config: Path, precision: str) -> None:
    """The Trainer with logging, saving and evaluation off."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            turns.begin()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            turns.step_done()

    arguments = TrainingArguments(
        output_dir=str(config.parent / "trainer"),
        use_cpu=not _on_gpu(),
        bf16=precision == "bf16",
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
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
    )
    Trainer(_model(config), arguments, train_dataset=_examples(config), callbacks=[TakeTurns()]).train()


def shardlab_train(turns: Turns, config: Path, precision: str) -> None:
    """What `shardlab train` runs for each step: a window of packed rows, and the engine."""
    import numpy as np

    from shardlab.data import WindowLoader
    from shardlab.data.packing import PackedRows
    from shardlab.data.tokens import TokenStream
    from shardlab.model.build import build_model

    engine = _engine(config, precision)
    recipe = engine.recipe
    stream = _rows(config).flatten().numpy().astype(np.uint16)
    rows = PackedRows(TokenStream(stream, np.array([len(stream)])), sequence_length=SEQUENCE, eos=0)
    model, weights = build_model(recipe.model, vocabulary=1, eos_token_id=None, sequence_length=SEQUENCE, seed=0)
    engine.setup(model, weights, recipe.train.optimizer)
    loader = WindowLoader(
        rows,
        global_batch_size=MICRO_BATCH * ACCUMULATION,
        micro_batch=MICRO_BATCH,
        rank=0,
        world_size=1,
        seed=0,
        steps=recipe.train.steps,
    )
    turns.begin()
    for window in loader:
        turns.step_done(engine.run(window).loss)


def shardlab_loop(turns: Turns, config: Path, precision: str) -> None:
    """A user's own loop with the engine, over the same DataLoader as the Accelerate loop's."""
    from torch.utils.data import DataLoader

    engine = _engine(config, precision)
    model = _model(config)
    loader = DataLoader(_examples(config), batch_size=MICRO_BATCH)
    _, _, windows = engine.prepare(model, _optimizer(model), _again(loader))
    turns.begin()
    for window in windows:
        turns.step_done(engine.step(window))


def _engine(config: Path, precision: str) -> Any:
    from shardlab.recipe import Recipe
    from shardlab.train.engine import Engine

    train = {
        "precision": precision,
        "global_batch_size": MICRO_BATCH * ACCUMULATION,
        "steps": 1000,
        "optimizer": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        "schedule": {"name": "constant", "warmup_steps": WARMUP},
    }
    shard = {"micro_batch": MICRO_BATCH}
    data = {"sequence_length": SEQUENCE}
    return Engine.from_recipe(
        Recipe.from_dict({"model": {"config": str(config)}, "data": data, "train": train, "shard": shard})
    )


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


CONTESTANTS: dict[str, Callable[[Turns, Path, str], None]] = {
    LOOP: accelerate_loop,
    TRAINER: hf_trainer,
    OUR_RUN: shardlab_train,
    OUR_LOOP: shardlab_loop,
}

if __name__ == "__main__":
    sys.exit(main())
