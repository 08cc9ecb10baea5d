"""Tokenise and pack text: CPU-seconds and peak memory, beside bare `tokenizers` and `datasets.map`.

Every contestant gets the same .jsonl file and tokenizer, in a process of its own. What counts begins when its libraries
are imported. CPU-seconds are user and system time of the process and its children. Peak memory is that of all of them:
anonymous and shared pages, looked at from outside twenty times a second, above what the libraries hold.
"""

import argparse
import json
import resource
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from report import MiB, Report, Target, say

BARE = "tokenizers encode_batch_fast"
OURS = "shardlab"
BATCH_CHARACTERS = 1 << 20
SECONDS_BETWEEN_LOOKS = 0.05
LIMIT = 1.1  # CPU-seconds, as a ratio to the bare encoder's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60, help="of text")
    parser.add_argument("--vocabulary", type=int, default=16384, help="of the tokenizer")
    parser.add_argument("--sequence", type=int, default=512, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contestant, of which the median counts")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)  # its own process
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        measure(options)
    else:
        compare(options).print(options.json)


def compare(options: argparse.Namespace) -> Report:
    """Run every contestant, one after another, as often as asked."""
    columns = {"": "", "wall s": ".1f", "CPU s": ".1f", "to bare": ".2f", "peak MiB": ".0f", "tokens": ",d"}
    report = Report(f"Tokenise and pack {options.megabytes} MB of text", columns)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for number in range(options.repeats):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_text(directory / "text.jsonl", options.megabytes * 1_000_000)
            train_tokenizer(directory, options.vocabulary)
            for contestant in CONTESTANTS:
                say(f"{contestant}, run {number + 1} of {options.repeats} ...")
                runs[contestant].append(run(contestant, directory, options))
    figures = {name: sorted(results, key=lambda r: r["cpu"])[len(results) // 2] for name, results in runs.items()}
    bare = figures[BARE]["cpu"]
    for name, figure in figures.items():
        report.rows.append(
            {
                "": name,
                "wall s": figure["wall"],
                "CPU s": figure["cpu"],
                "to bare": figure["cpu"] / bare,
                "peak MiB": figure["peak"] / MiB,
                "tokens": int(figure["tokens"]),
            }
        )
    report.targets = [Target("shardlab's CPU-seconds / the bare encoder's", figures[OURS]["cpu"] / bare, LIMIT)]
    report.notes = [
        f"Each row is the run with the median CPU-seconds of {options.repeats}.",
        "The bare encoder packs into one array and writes nothing; shardlab also loads the tokenizer, hashes the file,",
        "looks for bad records and writes a verified cache; datasets.map tokenises and groups in batches, as",
        "transformers' run_clm example does, and writes its cache.",
    ]
    return report


def write_text(path: Path, size: int) -> None:
    """The standard library's source, again and again with its letters exchanged, so that words are new each time."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.glob("*.py")) + sorted(root.glob("[!st]*/*.py")) if file.is_file()]
    written, turn = 0, 0
    with path.open("w", encoding="utf-8") as out:
        while written < size:
            letters = string.ascii_lowercase
            exchanged = str.maketrans(letters, letters[turn:] + letters[:turn])
            for file in files:
                text = file.read_text(encoding="utf-8", errors="ignore").replace("\0", "").translate(exchanged)
                if text.strip() and written < size:
                    out.write(json.dumps({"text": text}) + "\n")
                    written += len(text)
            turn += 1


def train_tokenizer(directory: Path, vocabulary: int) -> None:
    """A byte-level BPE of the first 8 MB, saved as transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    sample, characters = [], 0
    for text in texts(directory):
        sample.append(text)
        characters += len(text)
        if characters > 8 << 20:
            break
    tokenizer.train_from_iterator(sample, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory / "tokenizer")


def texts(directory: Path) -> Iterator[str]:
    with (directory / "text.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def run(contestant: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """One contestant's figures."""
    own = ["--contestant", contestant, "--directory", str(directory), "--sequence", str(options.sequence)]
    with subprocess.Popen([sys.executable, __file__, *own], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base = float(process.stdout.readline())
        peak = base
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(SECONDS_BETWEEN_LOOKS)
        result: dict[str, float] = json.loads(process.stdout.read())
    if process.returncode:
        raise SystemExit(process.returncode)
    return result | {"peak": peak - base}


def memory_of(pid: int) -> int:
    """Anonymous and shared pages of a process and its descendants, in bytes."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for one in pids:
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue  # it has just ended
        total += sum(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))
        )
    return total


def measure(options: argparse.Namespace) -> None:
    """A contestant's own process: say what the libraries hold, work, say what it took."""
    work = CONTESTANTS[options.contestant](options.directory, options.sequence)
    print(memory_of(psutil.Process().pid), flush=True)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    tokens = work()
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": _cpu_seconds() - cpu, "tokens": tokens}), flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def bare(directory: Path, sequence: int) -> Callable[[], int]:
    """What there is to do at the least: encode, and lay the ids in a row."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")

    def work() -> int:
        parts: list[Any] = []
        batch: list[str] = []

        def encode() -> None:
            for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                parts.append(np.asarray([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
            batch.clear()

        characters = 0
        for text in texts(directory):
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                encode()
                characters = 0
        encode()
        packed = np.concatenate(parts)
        rows = packed[: len(packed) // sequence * sequence].reshape(-1, sequence)
        return int(rows.size)

    return work


def mapped(directory: Path, sequence: int, processes: int) -> Callable[[], int]:
    """transformers' run_clm example: tokenise in batches, then group."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    datasets.disable_progress_bars()

    def tokenise(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*document, tokenizer.eos_token_id] for document in ids]}

    def group(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        joined = [token for document in batch["input_ids"] for token in document]
        end = len(joined) // sequence * sequence
        return {"input_ids": [joined[start : start + sequence] for start in range(0, end, sequence)]}

    def work() -> int:
        cache = tempfile.mkdtemp(dir=directory)
        source = datasets.load_dataset("json", data_files=str(directory / "text.jsonl"), split="train", cache_dir=cache)
        workers = processes if processes > 1 else None
        tokens = source.map(tokenise, batched=True, remove_columns=["text"], num_proc=workers)
        rows = tokens.map(group, batched=True, num_proc=workers)
        return len(rows) * sequence

    return work


def shardlab(directory: Path, sequence: int) -> Callable[[], int]:
    """`prepare_data`, from the file to rows."""
    import datasets  # noqa: F401  (prepare_data imports these two when it needs them)
    import pyarrow.compute  # noqa: F401

    from shardlab.data import prepare_data
    from shardlab.recipe import DataSection

    cache = directory / "shardlab-cache"
    section = DataSection(
        files=(str(directory / "text.jsonl"),),
        tokenizer=str(directory / "tokenizer"),
        sequence_length=sequence,
        evaluation_fraction=0.0,
        cache_dir=str(cache),
    )

    def work() -> int:
        train: Any = prepare_data(section).train
        return len(train) * sequence

    return work


CONTESTANTS: dict[str, Callable[[Path, int], Callable[[], int]]] = {
    BARE: bare,
    OURS: shardlab,
    "shardlab, cache there": shardlab,  # what the one before left
    "datasets.map": lambda directory, sequence: mapped(directory, sequence, 1),
    "datasets.map, 2 processes": lambda directory, sequence: mapped(directory, sequence, 2),
}


if __name__ == "__main__":
    main()
